"""What `offload train` trains, and how: a GPT, its text and a plain PyTorch loop with OffloadZero.

Of this library it imports only what every user imports, the names of `offload` itself. So it is an example of them,
too. What the options mean, and what people see of a run, is in `cli/`.
"""
