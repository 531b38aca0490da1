"""A diffusion transformer from training to onnxruntime: learn to draw eight shapes, export, draw the same pictures on both sides.

How to run, from the repository's root, in an environment with the package, its extras `cpu` and `torch`, and Pillow:

    python examples/diffusion.py             # trains (some minutes on one core), then shows all that follows
    python examples/diffusion.py             # again: takes the weights from build/diffusion
    python examples/diffusion.py --quick     # the same road in half a minute; nothing is learned, so no shape is recognised

1. trains `small_dit.SmallDiT` on pictures that `drawn_shapes` draws
2. exports it with one node for each attention, for every batch and every picture size, and proves the file equal to PyTorch
3. draws from the same noise with both, saves the pictures side by side, and lets a judge say which shapes they show
4. times one step of the sampler: PyTorch, the file of plain torch.onnx, and ours

Exits with 1 if anything that it shows is not as it should be.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from drawn_shapes import SHAPES, SIZE, Judge, random_pictures
from PIL import Image
from small_dit import SmallDiT
from torch import nn

import qknorm_onnx as qk
from qknorm_onnx.speed.timing import clock_for, interleaved, ratio_of_pairs, wait_until_quiet

ANY_SHAPE = len(SHAPES)
ANY_SHAPE_SHARE = 0.1
BATCH = 64
GUIDANCE = 2.0
# Two samplers that differ by rounding alone differ by less than a grey level of a PNG (2 / 255), however many steps they take.
SAME_PICTURE = 2 / 255
RECOGNISED_SHARE = 0.9
OTHER_SIZE = (24, 20)

Velocity = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much of everything: updates, blocks, pictures of each shape, steps from noise to picture, rounds of timing."""

    updates: int
    depth: int
    pictures: int
    steps: int
    rounds: int


FULL = Plan(updates=1200, depth=4, pictures=8, steps=25, rounds=20)
QUICK = Plan(updates=20, depth=1, pictures=1, steps=5, rounds=3)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train or load, export, compare and time; 0 where all holds."""
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    plan = QUICK if options.quick else FULL
    options.out.mkdir(parents=True, exist_ok=True)
    model = trained(plan, options.out / f"weights-{plan.updates}.pt")

    heading("Export: one node per attention")
    program = exported(model)
    print(*program.report.fused, sep="\n")
    report = qk.validate(program, model, kwargs=example_inputs(), dtypes=options.dtypes)
    print(report.summary())
    program.save(options.out / "model.onnx")
    session = qk.create_session(options.out / "model.onnx", session_options=session_options(options.threads))

    heading("Pictures from the same noise")
    same = show_pictures(model, session, plan, options.out)
    judged = options.quick or show_recognised(session, plan)

    heading("Steps per second, with guidance: two pictures through the network for each that is drawn")
    equal = show_speed(model, session, plan, options.threads, options.out / "plain.onnx")
    return 0 if program.report.complete and report.passed and same and judged and equal else 1


def heading(text: str) -> None:
    """A line that the eye finds."""
    print(f"\n== {text}", flush=True)


# ---------------------------------------------------------------------------------------------------------------- training


def trained(plan: Plan, path: Path) -> SmallDiT:
    """The network with the weights of `path`, which are learned first where the file is not there."""
    torch.manual_seed(0)
    model = SmallDiT(classes=len(SHAPES), depth=plan.depth)
    if path.is_file():
        model.load_state_dict(torch.load(path, weights_only=True))
    else:
        heading(f"Training: {plan.updates} updates with {BATCH} pictures each")
        train(model, plan.updates)
        torch.save(model.state_dict(), path)
    return model.eval()


def train(model: SmallDiT, updates: int) -> None:
    """Learn the velocity, noise - picture, at random points between them; prints the loss as it goes."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-3, total_steps=updates, pct_start=0.1, cycle_momentum=False)
    generator = torch.Generator().manual_seed(1)
    losses: list[float] = []
    begun = time.perf_counter()
    for update in range(1, updates + 1):
        loss = flow_loss(model, generator)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        losses.append(float(loss.detach()))
        if update % 100 == 0 or update == updates:
            print(f"update {update:5d}  loss {statistics.mean(losses):.4f}  {time.perf_counter() - begun:5.0f} s", flush=True)
            losses.clear()


def flow_loss(model: SmallDiT, generator: torch.Generator) -> torch.Tensor:
    """Mean square error of the velocity on a fresh batch. Most times lie in the middle, where there is most to decide."""
    pictures, labels = random_pictures(BATCH, generator)
    labels[torch.rand(BATCH, generator=generator) < ANY_SHAPE_SHARE] = ANY_SHAPE
    noise = torch.randn(pictures.shape, generator=generator)
    t = torch.randn(BATCH, generator=generator).sigmoid()
    between = torch.lerp(pictures, noise, t[:, None, None, None])
    return (model(between, t, labels) - (noise - pictures)).square().mean()


# ------------------------------------------------------------------------------------------------------------------ export


def example_inputs() -> dict[str, torch.Tensor]:
    """Any inputs of the right kind: two pictures, two times, a shape and "any shape"."""
    generator = torch.Generator().manual_seed(2)
    return {
        "x": torch.randn(2, 1, SIZE, SIZE, generator=generator),
        "t": torch.tensor([0.3, 0.9]),
        "label": torch.tensor([1, ANY_SHAPE]),
    }


DYNAMIC = {"x": {0: "batch", 2: "height", 3: "width"}, "t": {0: "batch"}, "label": {0: "batch"}}


def exported(model: SmallDiT) -> qk.Program:
    """One file for every batch and picture size. `require_fusion` raises, with the reason, where an attention is not one node."""
    return qk.export(model, kwargs=example_inputs(), dynamic_shapes=DYNAMIC, require_fusion=True)


def session_options(threads: int) -> onnxruntime.SessionOptions:
    """onnxruntime with as many threads as PyTorch has."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return options


def velocity_of(session: onnxruntime.InferenceSession) -> Velocity:
    """A session that is called as the module is."""

    def velocity(x: torch.Tensor, t: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        (result,) = session.run(None, {"x": x.numpy(), "t": t.numpy(), "label": label.numpy()})
        return torch.from_numpy(result)

    return velocity


# ---------------------------------------------------------------------------------------------------------------- sampling


@torch.no_grad()
def draw(velocity: Velocity, noise: torch.Tensor, labels: torch.Tensor, steps: int) -> torch.Tensor:
    """From noise `(batch, 1, height, width)` to pictures of `labels`, in `steps` equal steps against the velocity."""
    x = noise
    for step in range(steps):
        x = x - guided(velocity, x, 1 - step / steps, labels) / steps
    return x


def guided(velocity: Velocity, x: torch.Tensor, t: float, labels: torch.Tensor) -> torch.Tensor:
    """Classifier-free guidance: away from what any shape would look like. One call with twice the batch."""
    both = torch.cat([labels, torch.full_like(labels, ANY_SHAPE)])
    of_label, of_any = velocity(torch.cat([x, x]), torch.full((len(both),), t), both).chunk(2)
    return of_any + GUIDANCE * (of_label - of_any)


def noise_for(pictures: int, height: int = SIZE, width: int = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    """Noise and labels for so many pictures of each shape, shape after shape."""
    labels = torch.arange(len(SHAPES)).repeat_interleave(pictures)
    return torch.randn(len(labels), 1, height, width, generator=torch.Generator().manual_seed(3)), labels


def show_pictures(model: SmallDiT, session: onnxruntime.InferenceSession, plan: Plan, folder: Path) -> bool:
    """Draw with both sides, save what they drew; whether it is the same.

    Also at a size that the network has never seen: it may draw nonsense there, and both sides must draw the same nonsense.
    """
    same = True
    for height, width in ((SIZE, SIZE), OTHER_SIZE):
        noise, labels = noise_for(plan.pictures, height, width)
        by_torch = draw(model, noise, labels, plan.steps)
        by_onnxruntime = draw(velocity_of(session), noise, labels, plan.steps)
        largest = float((by_torch - by_onnxruntime).abs().max())
        name = folder / f"pictures-{height}x{width}.png"
        save_pictures(name, by_torch, by_onnxruntime)
        print(f"{name}: {len(labels)} pictures, largest difference {largest:.1e} where white - black is 2")
        same = same and largest < SAME_PICTURE
    print("the same pictures" if same else "DIFFERENT pictures")
    return same


def save_pictures(path: Path, by_torch: torch.Tensor, by_onnxruntime: torch.Tensor) -> None:
    """A PNG with a column for each shape: above the white line PyTorch's pictures, below it onnxruntime's."""
    halves = [columns_of(pictures) for pictures in (by_torch, by_onnxruntime)]
    line = torch.ones(2, halves[0].shape[1])
    grey = torch.cat([halves[0], line, halves[1]]).clamp(-1, 1)
    levels = ((grey + 1) * 127.5).round().to(torch.uint8).numpy()
    Image.fromarray(np.kron(levels, np.ones((4, 4), np.uint8))).save(path)


def columns_of(pictures: torch.Tensor) -> torch.Tensor:
    """Pictures `(shapes * rows, 1, height, width)` as one image, with a grey frame around each."""
    framed = nn.functional.pad(pictures[:, 0], (1, 1, 1, 1), value=-0.6)
    columns = framed.unflatten(0, (len(SHAPES), -1))
    return torch.cat([torch.cat(list(column)) for column in columns], dim=1)


def show_recognised(session: onnxruntime.InferenceSession, plan: Plan) -> bool:
    """How many pictures by onnxruntime show the shape that was asked for, each shape alone; whether they are enough."""
    noise, labels = noise_for(plan.pictures)
    seen, distance = Judge.make().shapes_in(draw(velocity_of(session), noise, labels, plan.steps))
    right = seen == labels
    for number, shape in enumerate(SHAPES):
        mine = labels == number
        print(
            f"{shape:>10}: {int(right[mine].sum())} of {int(mine.sum())}, off the nearest drawing by {distance[mine].mean():.2f}"
        )
    share = float(right.float().mean())
    print(f"{share:.0%} are recognised")
    return share >= RECOGNISED_SHARE


# ------------------------------------------------------------------------------------------------------------------- speed


def plain_session(model: SmallDiT, path: Path, threads: int) -> onnxruntime.InferenceSession:
    """What torch.onnx alone makes of the model, in the same onnxruntime."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.export says that it found a name twice
        torch.onnx.export(model, (), path, kwargs=example_inputs(), dynamic_shapes=DYNAMIC, dynamo=True, verbose=False)
    return onnxruntime.InferenceSession(path, session_options(threads), providers=["CPUExecutionProvider"])


def show_speed(model: SmallDiT, session: onnxruntime.InferenceSession, plan: Plan, threads: int, path: Path) -> bool:
    """Times of one step in turns, at two picture sizes; whether all compute the same."""
    sides = {
        "PyTorch": model,
        "torch.onnx": velocity_of(plain_session(model, path, threads)),
        "qknorm-onnx": velocity_of(session),
    }
    clock_name, clock = clock_for(threads)
    print(f"{threads} thread(s), medians of {plan.rounds} rounds by {clock_name}; {len(SHAPES)} pictures at once")
    equal = True
    for size in (SIZE, 2 * SIZE):
        noise, labels = noise_for(1, size, size)
        steps = {name: one_step(velocity, noise, labels) for name, velocity in sides.items()}
        results = {name: step() for name, step in steps.items()}
        equal = equal and all(torch.allclose(result, results["PyTorch"], rtol=0, atol=1e-4) for result in results.values())
        times = interleaved(steps, rounds=plan.rounds, clock=clock, pause=wait_until_quiet)
        for name, seconds in times.items():
            faster = ratio_of_pairs(times["qknorm-onnx"], seconds)
            rate = 1 / statistics.median(seconds)
            print(f"{size} x {size}  {name:>12}: {rate:7.1f} steps per second; qknorm-onnx {faster:.2f} times as fast")
    print("all compute the same" if equal else "DIFFERENT results")
    return equal


def one_step(velocity: Velocity, noise: torch.Tensor, labels: torch.Tensor) -> Callable[[], torch.Tensor]:
    """A step of the sampler, to be timed."""

    @torch.no_grad()
    def step() -> torch.Tensor:
        return guided(velocity, noise, 0.5, labels)

    return step


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small diffusion transformer, export it, draw with both.")
    parser.add_argument("--out", type=Path, default=Path("build/diffusion"), help="folder of weights, files and pictures")
    parser.add_argument("--quick", action="store_true", help="hardly train, draw little")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtypes", nargs="+", default=["float32"], help="types in which the file is compared with PyTorch")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
