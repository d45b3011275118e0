"""JAX as `jax_session` sets it up."""

from jax_session import programs_let_go, start

__all__ = ["programs_let_go"]

start()
