"""Train a neural correction to Lotka-Volterra on 21 years of hare and lynx pelts.

    python experiments/train_hare_lynx_torch.py [--adjoint checkpoint] [--resume] [--compare]

In logarithms, u of the hares and v of the lynx,

    u' = alpha - beta e^v + c_1(u, v),   v' = -gamma + delta e^u + c_2(u, v),

with a small network c that starts at zero. The rates, the network and the state in 1900 are fitted
to the first years; the years after them are forecast and never seen. `--hidden 0` leaves the
network out. Writes checkpoint.pt, loss.png and forecast.png.
"""

from __future__ import annotations

import numpy as np
import torch
from _hare_lynx import FINE, LOG_PELTS, PENALTY, YEARS, draw, log_error, report
from _training import console
from _training_torch import Trainer, adjoint_of, compare, cost_of, parser, start
from torch import Tensor, nn

import contadj.torch as ct


class CorrectedLotkaVolterra(nn.Module):
    """Lotka-Volterra in logarithms plus a network."""

    def __init__(self, log_pelts: Tensor, hidden: int):
        super().__init__()
        # A cycle of ten years, 2 pi / sqrt(alpha gamma), around the mean counts.
        hares, lynx = log_pelts.exp().mean(0)
        rates = torch.stack([torch.tensor(0.6), 0.6 / lynx, torch.tensor(0.6), 0.6 / hares])
        self.log_rates = nn.Parameter(rates.log())
        self.register_buffer("center", log_pelts.mean(0))
        self.network = None
        if hidden:
            self.network = nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 2))
            for param in self.network[-1].parameters():
                nn.init.zeros_(param)

    def correction(self, y: Tensor) -> Tensor:
        """c(u, v)."""
        if self.network is None:
            return torch.zeros_like(y)
        return self.network(y - self.center)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        alpha, beta, gamma, delta = self.log_rates.exp()
        u, v = y.unbind(-1)
        known = torch.stack([alpha - beta * v.exp(), -gamma + delta * u.exp()], -1)
        return known + self.correction(y)


class Populations(nn.Module):
    """The log counts at given years."""

    def __init__(self, log_pelts: Tensor, hidden: int, adjoint: ct.Adjoint, num_steps: int):
        super().__init__()
        self.start = nn.Parameter(log_pelts[0].clone())
        self.solve = ct.NeuralODE(
            CorrectedLotkaVolterra(log_pelts, hidden), method="rk4", adjoint=adjoint,
            options={"num_steps": num_steps}, returns="all",
        )  # fmt: skip

    def forward(self, years: Tensor) -> Tensor:
        return self.solve(self.start, years)


def main() -> None:
    options = parser(__doc__.partition("\n")[0], "out/hare_lynx", epochs=300, num_steps=4)
    options.add_argument("--train-years", type=int, default=16)
    options.add_argument("--hidden", type=int, default=8)
    arguments = start(options)
    if not 2 <= arguments.train_years < len(YEARS):
        options.error(f"--train-years: expected 2 to {len(YEARS) - 1}")
    torch.set_default_dtype(torch.float64)
    seen = arguments.train_years
    years = torch.from_numpy(YEARS[:seen])
    targets = torch.from_numpy(LOG_PELTS[:seen]).to(arguments.device)

    def build(adjoint: ct.Adjoint, num_steps: int):
        torch.manual_seed(arguments.seed)
        model = Populations(targets, arguments.hidden, adjoint, num_steps)
        model.to(arguments.device)

        def loss() -> Tensor:
            states = model(years)
            size = model.solve.func.correction(states).square().mean()
            return (states - targets).square().mean() + PENALTY * size

        return model, model.solve, loss

    model, block, loss = build(adjoint_of(arguments.adjoint), arguments.num_steps)

    def forecast(years=YEARS) -> np.ndarray:
        with torch.no_grad():
            return np.asarray(model(torch.from_numpy(years)).cpu())

    trainer = Trainer(
        model=model, losses=lambda epoch: [loss],
        held_out=lambda: log_error(forecast(), slice(seen, None)),
        metric="held-out RMS log error", rate=0.02, out=arguments.out, epochs=arguments.epochs,
        evaluate_every=25,
        settings={
            "seed": arguments.seed, "adjoint": arguments.adjoint, "num_steps": arguments.num_steps,
            "train_years": seen, "hidden": arguments.hidden,
        },
    )  # fmt: skip
    if arguments.resume:
        trainer.load()
    if arguments.compare:
        compare(build, model, arguments.num_steps)
        return
    cost = cost_of(model, block, loss)
    trainer.fit(arguments.stop_after)
    console.print(f"loss curve: {trainer.draw()}")
    draw(forecast(FINE), seen, arguments.out / "forecast.png")
    report(forecast(), seen)
    console.print(
        f"{arguments.adjoint}: peak {cost.bytes / 1024:.0f} KiB live, "
        f"{1e3 * cost.seconds:.1f} ms and {cost.count} f evaluations per gradient"
    )


if __name__ == "__main__":
    main()
