"""What `plan`, `train` and `serve --plan` show. Knows no swarm.

training_plan   where a job would run, how fast, and what holds it up
serving_plan    what serving a model would take
"""
