"""Train a byte-level language model with TensorPlay, averaging models in pairs often and among all ranks seldom.

    python -m tensorplay.distributed.run --nproc-per-node 4 -- examples/train_tensorplay.py --steps 600

Prints the validation loss before and after, and the drift of the replicas, which is their distance from the mean,
before and after the last round among all ranks.
"""

import argparse
import math
import os
import random
from pydoc_data.topics import topics

import tensorplay as tp
import tensorplay.distributed as dist
import tensorplay.nn.functional as F
from tensorplay import nn

import averagers.tensorplay as averagers

CONTEXT, BATCH_SIZE, WIDTH = 8, 64, 128
PAIR_PERIOD, GLOBAL_PERIOD, WARMUP_STEPS = 4, 32, 32


class ByteModel(nn.Module):
    """Guesses a byte from the few before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.hidden = nn.Linear(16 * CONTEXT, WIDTH)
        self.logits = nn.Linear(WIDTH, 256)

    def forward(self, contexts: tp.Tensor) -> tp.Tensor:
        return self.logits(F.relu(self.hidden(self.embedding(contexts).reshape(-1, 16 * CONTEXT))))


def batch_of(text: bytes, starts: list[int]) -> tuple[tp.Tensor, tp.Tensor]:
    contexts = tp.tensor([list(text[start : start + CONTEXT]) for start in starts], dtype=tp.int64)
    return contexts, tp.tensor([text[start + CONTEXT] for start in starts], dtype=tp.int64)


def validation_loss(model: ByteModel, text: bytes) -> float:
    with tp.no_grad():
        contexts, following = batch_of(text, list(range(0, len(text) - CONTEXT, 23)))
        return F.cross_entropy(model(contexts), following).item()


def drift(model: ByteModel) -> float:
    """Return the L2 norm of the distance of the replicas from their mean, as root mean square over the ranks."""
    with tp.no_grad():
        own = tp.cat([parameter.reshape(-1) for parameter in model.parameters()])
        mean = own.clone()
        dist.all_reduce(mean)
        square = ((own - mean / dist.get_world_size()) ** 2).sum()
        dist.all_reduce(square)
        return math.sqrt(square.item() / dist.get_world_size())


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def train(num_steps: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    training, validation = text[: len(text) * 9 // 10], text[len(text) * 9 // 10 :]
    tp.manual_seed(0)
    model = ByteModel()
    optimizer = tp.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    pairs = {PAIR_PERIOD: 2} if world_size % 2 == 0 and world_size > 2 else {}
    averager = averagers.HierarchicalModelAverager({**pairs, GLOBAL_PERIOD: world_size}, WARMUP_STEPS)
    averager.broadcast(model.state_dict().items())
    draws = random.Random(rank)
    say(f"{averager}")
    say(f"validation loss before training: {validation_loss(model, validation):.3f} nats a byte")
    for step in range(num_steps):
        starts = [draws.randrange(len(training) - CONTEXT) for _ in range(BATCH_SIZE)]
        contexts, following = batch_of(training, starts)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(contexts), following)
        loss.backward()
        optimizer.step()
        averager.average_parameters(model.parameters())
        if step % 100 == 99:
            say(f"step {step + 1}: loss of rank 0 {loss.item():.3f}")
    say(f"drift before the last round: {drift(model):.3g}")
    averager.finish(model.parameters())
    say(f"drift after it: {drift(model):.3g}")
    say(f"validation loss after training: {validation_loss(model, validation):.3f} nats a byte")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="steps of each rank")
    options = parser.parse_args()
    tp.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
    dist.init_process_group("gloo")
    train(options.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
