"""Train a neural correction to Lotka-Volterra on 21 years of hare and lynx pelts, in JAX.

    python experiments/train_hare_lynx_jax.py [--adjoint checkpoint] [--resume] [--compare]

In logarithms, u of the hares and v of the lynx,

    u' = alpha - beta e^v + c_1(u, v),   v' = -gamma + delta e^u + c_2(u, v),

with a small network c that starts at zero. The rates, the network and the state in 1900 are fitted
to the first years; the years after them are forecast and never seen. `--hidden 0` leaves the
network out. Writes checkpoint.eqx, loss.png and forecast.png.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from _hare_lynx import FINE, LOG_PELTS, PENALTY, YEARS, draw, log_error, report
from _training import console
from _training_jax import Trainer, adjoint_of, compare, cost_of, parser, start

import contadj.jax as cj


class CorrectedLotkaVolterra(eqx.Module):
    """Lotka-Volterra in logarithms plus a network."""

    log_rates: jax.Array
    center: tuple[float, ...] = eqx.field(static=True)
    network: eqx.nn.MLP | None

    def __init__(self, log_pelts: np.ndarray, hidden: int, key):
        # A cycle of ten years, 2 pi / sqrt(alpha gamma), around the mean counts.
        hares, lynx = np.exp(log_pelts).mean(0)
        self.log_rates = jnp.log(jnp.array([0.6, 0.6 / lynx, 0.6, 0.6 / hares]))
        self.center = tuple(map(float, log_pelts.mean(0)))
        self.network = None
        if hidden:
            network = eqx.nn.MLP(2, 2, hidden, 1, jnp.tanh, key=key)
            last = lambda m: (m.layers[-1].weight, m.layers[-1].bias)  # noqa: E731
            zeros = tuple(jnp.zeros_like(x) for x in last(network))
            self.network = eqx.tree_at(last, network, zeros)

    def correction(self, y):
        """c(u, v)."""
        if self.network is None:
            return jnp.zeros_like(y)
        return self.network(y - jnp.asarray(self.center))

    def __call__(self, t, y):
        alpha, beta, gamma, delta = jnp.exp(self.log_rates)
        u, v = y
        known = jnp.stack([alpha - beta * jnp.exp(v), -gamma + delta * jnp.exp(u)])
        return known + self.correction(y)


class Populations(eqx.Module):
    """The log counts at given years."""

    start: jax.Array
    solve: cj.NeuralODE

    def __init__(self, log_pelts: np.ndarray, hidden: int, adjoint, num_steps: int, key):
        self.start = jnp.asarray(log_pelts[0])
        self.solve = cj.NeuralODE(
            CorrectedLotkaVolterra(log_pelts, hidden, key), method="rk4", adjoint=adjoint,
            num_steps=num_steps, returns="all",
        )  # fmt: skip

    def __call__(self, years):
        return self.solve(self.start, years)


def loss(model: Populations, years, targets):
    """Mean squared log error, and the size of the correction."""
    states = model(years)
    size = jnp.mean(jax.vmap(model.solve.func.correction)(states) ** 2)
    return jnp.mean((states - targets) ** 2) + PENALTY * size


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    options = parser(__doc__.partition("\n")[0], "out/hare_lynx_jax", epochs=300, num_steps=4)
    options.add_argument("--train-years", type=int, default=16)
    options.add_argument("--hidden", type=int, default=8)
    arguments = start(options)
    if not 2 <= arguments.train_years < len(YEARS):
        options.error(f"--train-years: expected 2 to {len(YEARS) - 1}")
    seen = arguments.train_years
    batch = jnp.asarray(YEARS[:seen]), jnp.asarray(LOG_PELTS[:seen])

    def build(adjoint, num_steps: int):
        key = jax.random.key(arguments.seed)
        model = Populations(LOG_PELTS[:seen], arguments.hidden, adjoint, num_steps, key)
        return model, loss, batch

    model, _, _ = build(adjoint_of(arguments.adjoint), arguments.num_steps)

    @eqx.filter_jit
    def states(model, years):
        return model(years)

    def forecast(model, years=YEARS) -> np.ndarray:
        return np.asarray(states(model, jnp.asarray(years)))

    trainer = Trainer(
        model=model, loss=loss, batches=lambda epoch: [batch],
        held_out=lambda model: log_error(forecast(model), slice(seen, None)),
        metric="held-out RMS log error", rate=0.02, steps_per_epoch=1, out=arguments.out,
        epochs=arguments.epochs, evaluate_every=25,
        settings={
            "seed": arguments.seed, "adjoint": arguments.adjoint, "num_steps": arguments.num_steps,
            "train_years": seen, "hidden": arguments.hidden,
        },
    )  # fmt: skip
    if arguments.resume:
        trainer.load()
    if arguments.compare:
        compare(build, trainer.model, arguments.num_steps)
        return
    cost = cost_of(model, loss, batch)
    trainer.fit(arguments.stop_after)
    console.print(f"loss curve: {trainer.draw()}")
    draw(forecast(trainer.model, FINE), seen, arguments.out / "forecast.png")
    report(forecast(trainer.model), seen)
    console.print(
        f"{arguments.adjoint}: {cost.bytes / 1024:.0f} KiB of temporaries, "
        f"{1e3 * cost.seconds:.2f} ms per gradient, {cost.count:.1f} s to compile"
    )


if __name__ == "__main__":
    main()
