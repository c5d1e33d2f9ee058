"""Samples as named arrays, read on the launching machine. Knows no blobs: `fusion.runtime.launch.pack` makes
them.

dataset         arrays of samples: reading, checks, held-out ones
npz             arrays in a file of numpy's
image_folders   images, a folder for each class
jsonl           an object a line
sources         which of them a job file means
python_job      a model in Python and the samples that it takes
held_out        which of the held-out samples an evaluation reads
numbered        labels and indices, checked against the model's classes and rows
"""
