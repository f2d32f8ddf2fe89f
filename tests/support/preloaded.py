"""What ranks find imported when they are forked."""

import torch  # noqa: F401
import torch.distributed  # noqa: F401

import offload.comm  # noqa: F401
