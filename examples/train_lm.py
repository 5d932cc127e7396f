"""Train a byte-level language model on a text file, averaging models now and then instead of gradients.

On one machine; and on two, the same line on each, with the name of the first:

    torchrun --nproc-per-node 4 examples/train_lm.py --data book.txt
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint first:29500 examples/train_lm.py

With --checkpoint DIR it saves there now and then, and a run started again goes on from the last save.
"""

import argparse
import os
from pathlib import Path
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import averagers

CONTEXT, BATCH_SIZE, WIDTH, NUM_LAYERS, NUM_HEADS, LEARNING_RATE = 64, 8, 96, 2, 2, 4e-3
NODE_PERIOD, GLOBAL_PERIOD, WARMUP_STEPS = 4, 32, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(2))
        self.project = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.from_heads = nn.Linear(WIDTH, WIDTH, bias=False)
        self.feedforward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor, rotation: Tensor) -> Tensor:
        query, key, value = self.project(self.norms[0](hidden)).unflatten(2, (3, NUM_HEADS, -1)).permute(2, 0, 3, 1, 4)
        query, key = (rotate(1.5 * F.layer_norm(x, x.shape[-1:]), rotation) for x in (query, key))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.from_heads(mixed.transpose(1, 2).flatten(2))
        return hidden + self.feedforward(self.norms[1](hidden))


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    (cos, sin), (first, second) = rotation, x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


class ByteTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        angles = torch.outer(torch.arange(CONTEXT), 1e3 ** -torch.linspace(0, 1, WIDTH // NUM_HEADS // 2))
        self.register_buffer("rotation", torch.stack((angles.cos(), angles.sin())), persistent=False)

    def forward(self, windows: Tensor) -> Tensor:
        """Return the mean loss of guessing each byte of the windows but the first."""
        hidden = self.embedding(windows[:, :-1])
        for block in self.blocks:
            hidden = block(hidden, self.rotation)
        logits = F.linear(self.norm(hidden), self.embedding.weight)
        return F.cross_entropy(logits.transpose(1, 2), windows[:, 1:])


def new_averager() -> averagers.HierarchicalModelAverager:
    """Average often within a node and seldom among all, whatever the number of nodes."""
    world_size, node_size = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    within_nodes = {NODE_PERIOD: node_size} if 1 < node_size < world_size else {}
    return averagers.HierarchicalModelAverager({**within_nodes, GLOBAL_PERIOD: world_size}, WARMUP_STEPS)


def save(folder: Path, step: int, state: dict) -> None:
    """Save this rank's state: between two rounds every rank has a model of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"rank-{dist.get_rank()}-step-{step}.pt"
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)  # never half a file under this name
    dist.barrier()  # only now can no rank need the save before this one
    for older in set(folder.glob(f"rank-{dist.get_rank()}-step-*.pt")) - {path}:
        older.unlink()


def load(folder: Path, device: torch.device) -> dict | None:
    """Return what this rank saved at the last step that all ranks have saved, or None."""
    paths = {int(path.stem.split("-")[-1]): path for path in folder.glob(f"rank-{dist.get_rank()}-step-*.pt")}
    step = torch.tensor(max(paths, default=0), device=device)
    dist.all_reduce(step, dist.ReduceOp.MIN)
    return torch.load(paths[step.item()], map_location="cpu", weights_only=True) if step else None


def train(options: argparse.Namespace, device: torch.device) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    text = options.data.read_bytes() if options.data else "\n".join(topics[name] for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().to(device)
    training = data[: len(data) * 9 // 10].unfold(0, CONTEXT + 1, 1)
    validation = data[len(data) * 9 // 10 :].unfold(0, CONTEXT + 1, CONTEXT)
    torch.manual_seed(0)
    model = ByteTransformer().to(device)
    ddp_model = DistributedDataParallel(model, forward_sync_buffers=False)  # makes the replicas equal
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    averager = new_averager()
    # Gradients go to all ranks during the averager's warm-up, and to this one alone after it.
    alone, _ = dist.new_subgroups(group_size=1)
    ddp_model.register_comm_hook(averagers.PostLocalSGDState(averager, alone), averagers.post_local_sgd_hook)
    stateful = {"model": model, "optimizer": optimizer, "averager": averager}
    saved = load(options.checkpoint, device) if options.checkpoint else None
    for name, part in stateful.items() if saved else ():
        part.load_state_dict(saved[name])

    with averagers.attach(optimizer, averager):  # at its end all ranks have one model
        for step in range(averager.step, options.steps):
            # A function of the step, like the learning rate: a resumed run goes on with the same data.
            order = torch.Generator().manual_seed(step * world_size + rank)
            batch = training[torch.randint(len(training), (BATCH_SIZE,), generator=order).to(device)]
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1, (step + 1) / 30) * (1 - 0.9 * step / options.steps)
            optimizer.zero_grad()
            loss = ddp_model(batch)
            loss.backward()
            optimizer.step()  # averages the models when a round is due
            if rank == 0 and (step + 1) % 50 == 0:
                print(f"step {step + 1}: training loss {loss.item():.4f}", flush=True)
            if options.checkpoint and (step + 1) % options.save_period == 0:
                save(options.checkpoint, step + 1, {name: part.state_dict() for name, part in stateful.items()})
    with torch.no_grad():
        loss = torch.stack([model(windows) for windows in validation.split(256)]).mean()
    if rank == 0:
        print(f"validation loss {loss.item():.6f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="a text file (default: Python's own help texts)")
    parser.add_argument("--checkpoint", type=Path, help="a folder to save to and to go on from (default: none)")
    parser.add_argument("--save-period", type=int, default=200, help="steps from one save to the next")
    parser.add_argument("--steps", type=int, default=1100)
    options = parser.parse_args()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(options, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
