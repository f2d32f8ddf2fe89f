"""What `offload train` trains, and how: a GPT, its text and a plain PyTorch loop with OffloadZero.

It imports of this library what every user has, the names of `offload` itself, so it is an example of them as well. What
the options mean, and what people see of a run, is in `cli/`.
"""
