"""Samples as named arrays, read on the launching machine. Knows no blobs: `fusion.runtime.launch.pack` makes
them.

dataset         what is read of them, and what is held out
npz             arrays in a file of numpy's
image_folders   images, a folder for each class
jsonl           an object a line
sources         which of them a job file means
python_job      a model in Python and the samples that it takes
held_out        which of the samples held out an evaluation reads
numbered        labels and indices, held against how many classes and rows the model has
"""
