"""Both frameworks in double precision, and JAX's compilation cache that outlives the run."""

import tempfile
from pathlib import Path

import jax
import torch

torch.set_num_threads(1)
jax.config.update("jax_enable_x64", True)
jax.config.update(
    "jax_compilation_cache_dir", str(Path(tempfile.gettempdir()) / "contadj-jax-cache")
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
