"""What every test that runs JAX needs: float64, a compilation cache, and programs let go."""

import tempfile
from pathlib import Path

import jax
import pytest


def start():
    """Turn double precision on, and JAX's compilation cache that outlives the run."""
    jax.config.update("jax_enable_x64", True)
    jax.config.update(
        "jax_compilation_cache_dir", str(Path(tempfile.gettempdir()) / "contadj-jax-cache")
    )
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


@pytest.fixture(autouse=True, scope="module")
def programs_let_go():
    """Clear JAX's caches after each file of tests.

    `eqx.filter_jit`, and so `diffrax.diffeqsolve`, keeps what it compiled for as long as the
    process lives. A program takes tens of memory maps, and XLA crashes at the 65,530 that Linux
    allows a process (https://github.com/jax-ml/jax/issues/27201).
    """
    yield
    jax.clear_caches()
