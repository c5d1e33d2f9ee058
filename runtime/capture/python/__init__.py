"""A model that its trainer wrote in Python. Only the machine that launches a job runs the file; it passes on graphs and tensors.

python_file    runs a user's file, and reports an error in it in one line
python_model   the file's module and loss as graphs
eager_run      compares a graph's results with those of the module itself
"""
