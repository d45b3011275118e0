"""Both frameworks in double precision, PyTorch on one thread, JAX as `jax_session` sets it up."""

import torch
from jax_session import programs_let_go, start

__all__ = ["programs_let_go"]

torch.set_num_threads(1)
start()
