"""A model that its trainer wrote in Python. Only the machine that launches a job runs the file; what it hands on are graphs
and tensors.

python_file    a file of the user's, and what goes wrong in it in one line
python_model   the module and the loss that it makes, as graphs
eager_run      whether a graph gives what the module itself gives
"""
