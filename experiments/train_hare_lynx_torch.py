"""Train a neural correction to Lotka-Volterra on 21 years of hare and lynx pelts.

    python experiments/train_hare_lynx_torch.py [--adjoint checkpoint] [--resume] [--compare]

In logarithms, u of the hares and v of the lynx,

    u' = alpha - beta e^v + c_1(u, v),   v' = -gamma + delta e^u + c_2(u, v),

with a small network c that starts at zero. The rates, the network and the state in 1900 are fitted
to the first years; the years after them are forecast and never seen. `--hidden 0` leaves the
network out. Writes checkpoint.pt, loss.png and forecast.png.
"""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from _training import Cost, Trainer, adjoint_of, compare, console, parser, start
from torch import Tensor, nn

import contadj.torch as ct
from contadj.problems import problem_data

DATA = problem_data("hare_lynx")
YEARS = torch.tensor(DATA.observation_times, dtype=torch.float64)
LOG_PELTS = torch.tensor(DATA.constants["log_pelts"])
PENALTY = 1e-2  # on the squared correction, so that it explains what the rates cannot


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


def draw(model: Populations, train_years: int, path) -> None:
    """Draw counts and forecast."""
    with torch.no_grad():
        fine = torch.linspace(float(YEARS[0]), float(YEARS[-1]), 201, dtype=torch.float64)
        curves = model(fine).exp().cpu()
    figure, axis = plt.subplots(figsize=(6, 3.5), layout="constrained")
    for species, (name, color) in enumerate((("hare", "tab:blue"), ("lynx", "tab:red"))):
        axis.plot(1900 + fine, curves[:, species], color=color, label=name)
        axis.plot(1900 + YEARS, LOG_PELTS[:, species].exp(), "o", color=color, markersize=4)
    axis.axvspan(1899.5 + train_years, 1920.5, color="0.9", label="held out")
    axis.set(xlabel="year", ylabel="pelts (thousands)", yscale="log")
    axis.legend(ncols=3)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    options = parser(__doc__.partition("\n")[0], "out/hare_lynx", epochs=300, num_steps=4)
    options.add_argument("--train-years", type=int, default=16)
    options.add_argument("--hidden", type=int, default=8)
    arguments = start(options)
    if not 2 <= arguments.train_years < len(YEARS):
        options.error(f"--train-years: expected 2 to {len(YEARS) - 1}")
    torch.set_default_dtype(torch.float64)
    seen = arguments.train_years
    targets = LOG_PELTS.to(arguments.device)

    def build(adjoint: ct.Adjoint, num_steps: int):
        torch.manual_seed(arguments.seed)
        model = Populations(targets[:seen], arguments.hidden, adjoint, num_steps)
        model.to(arguments.device)

        def loss() -> Tensor:
            states = model(YEARS[:seen])
            size = model.solve.func.correction(states).square().mean()
            return (states - targets[:seen]).square().mean() + PENALTY * size

        return model, model.solve, loss

    model, block, loss = build(adjoint_of(arguments.adjoint), arguments.num_steps)

    def errors(part: slice) -> float:
        with torch.no_grad():
            return float((model(YEARS) - targets)[part].square().mean().sqrt())

    trainer = Trainer(
        model, lambda epoch: [loss], lambda: errors(slice(seen, None)), "held-out RMS log error",
        rate=0.02, out=arguments.out, epochs=arguments.epochs, evaluate_every=25,
        settings={
            "seed": arguments.seed, "adjoint": arguments.adjoint, "num_steps": arguments.num_steps,
            "train_years": seen, "hidden": arguments.hidden,
        },
    )  # fmt: skip
    if arguments.resume:
        trainer.load()
    if arguments.compare:
        state = model.state_dict()

        def trained(adjoint: ct.Adjoint, num_steps: int):
            built = build(adjoint, num_steps)
            built[0].load_state_dict(state)
            return built

        compare(trained, arguments.num_steps)
        return
    cost = Cost.of(model, block, loss)
    trainer.fit(arguments.stop_after)
    console.print(f"loss curve: {trainer.draw()}")
    draw(model, seen, arguments.out / "forecast.png")
    # The counts of a decade before: the cycle is about that long.
    decade = targets[seen:] - targets[seen - 10 : len(YEARS) - 10] if seen >= 10 else None
    console.print(f"RMS log error on the {seen} years seen: {errors(slice(0, seen)):.3f}")
    console.print(
        f"RMS log error on the {len(YEARS) - seen} years held out: {errors(slice(seen, None)):.3f}"
    )
    if decade is not None:
        console.print(f"  the counts of ten years before: {decade.square().mean().sqrt():.3f}")
    console.print(
        f"{arguments.adjoint}: peak {cost.live / 1024:.0f} KiB live, "
        f"{1e3 * cost.seconds:.1f} ms and {cost.evaluations} f evaluations per gradient"
    )


if __name__ == "__main__":
    main()
