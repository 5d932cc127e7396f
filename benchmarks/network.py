"""Nodes with slow links between them, on this machine: network namespaces on a bridge, with tc's token bucket.

    make bench-network                           # all of the following but --quick, about 9 minutes
    python benchmarks/network.py                 # compares rounds over a slow link
    python benchmarks/network.py --quick         # a small model
    python benchmarks/network.py --overlap       # how long delayed rounds hold the loop
    python benchmarks/network.py --training      # the demo's model trained over a slower link, about 5 minutes

A node is a network namespace with a host name of its own; each of its two directions is limited to the rate. Ranks are
started with torchrun in each node and talk over gloo, bound to the node's interface; what really crossed a link is read
from the interface's counter. Needs root and iproute2 (ip, tc); without them it says so and exits with 2. Prints a table
and writes benchmarks/results/network.json, network-overlap.json, or network-training.json and a picture beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
RESULTS = HERE / "results"
TRAINING_MBIT = 40
TRAINING_STEPS = 481
MTU = 1500
# Of Ethernet, IP and TCP with timestamps, as the interface counts them.
HEADER_BYTES = 14 + 20 + 32
PAYLOAD_BYTES = MTU - 20 - 32

# Deletes the namespaces when its standard input ends: also where this process was killed.
JANITOR = """
import os, signal, subprocess, sys
sys.stdin.read()
for name in sys.argv[1:]:
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
    for pid in listed.split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            pass
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
"""


class NetworkUnavailableError(RuntimeError):
    """This machine or user cannot make network namespaces; the message says why."""


def run(*command: str) -> str:
    """Run a program and return its output; its error is a `NetworkUnavailableError`."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkUnavailableError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


class Network:
    """So many nodes on one switch, with a limited rate in both directions of each node's link.

    Args:
        num_nodes: How many.
        rate_mbit: Megabits a second of each direction.

    Raises:
        NetworkUnavailableError: it cannot be made here.
    """

    def __init__(self, num_nodes: int, rate_mbit: float) -> None:
        self.num_nodes = num_nodes
        self.rate_mbit = rate_mbit
        self.nodes = [f"averagers-{os.getpid()}-node{index}" for index in range(num_nodes)]
        self._switch = f"averagers-{os.getpid()}-switch"
        self._janitor: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Network:
        if os.geteuid() != 0:
            raise NetworkUnavailableError("network namespaces need root")
        for tool in ("ip", "tc", "unshare"):
            if shutil.which(tool) is None:
                raise NetworkUnavailableError(f"`{tool}` is not installed (packages iproute2 and util-linux)")
        names = [self._switch, *self.nodes]
        self._janitor = subprocess.Popen(
            [sys.executable, "-c", JANITOR, *names], stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            self._build()
        except BaseException:
            self._clean_up()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._clean_up()

    def _build(self) -> None:
        for name in (self._switch, *self.nodes):
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for index, node in enumerate(self.nodes):
            port = f"port{index}"
            pair = f"eth0 mtu {MTU} type veth peer name {port} mtu {MTU} netns {self._switch}"
            run("ip", "-n", node, "link", "add", *pair.split())
            run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            run("ip", "-n", node, "addr", "add", f"{self.address(index)}/24", "dev", "eth0")
            run("ip", "-n", node, "link", "set", "eth0", "up")
            # Out of the node, and into it. The kernel hands large segments on whole, which the counter would take for
            # one header: let it cut them.
            for namespace, device in ((node, "eth0"), (self._switch, port)):
                limit = f"root tbf rate {self.rate_mbit}mbit burst 32kb latency 100ms"
                run("tc", "-n", namespace, "qdisc", "add", "dev", device, *limit.split())

    def _clean_up(self) -> None:
        if self._janitor is not None and self._janitor.stdin is not None:
            self._janitor.stdin.close()
            self._janitor.wait()

    def address(self, node: int) -> str:
        """Return the address of a node."""
        return f"10.99.0.{node + 1}"

    def torchrun(self, ranks_per_node: int, script: Path, *arguments: str, timeout_s: float) -> None:
        """Run ``script`` on every node, and return when all have ended.

        Raises:
            RuntimeError: one failed, or did not end within the timeout; with its output.
        """
        with tempfile.TemporaryDirectory() as folder:
            outputs = [Path(folder) / f"{node}.txt" for node in self.nodes]
            programs = []
            for index, node in enumerate(self.nodes):
                # Each node its own host name, by which averagers tells nodes apart.
                shell = f'hostname node{index}; exec "$@"'
                enter = ["ip", "netns", "exec", node, "unshare", "--uts", "sh", "-c", shell, "sh"]
                torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={self.num_nodes}"]
                torchrun += [f"--nproc-per-node={ranks_per_node}", f"--node-rank={index}"]
                torchrun += [f"--master-addr={self.address(0)}", "--master-port=29500"]
                environment = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
                with outputs[index].open("w") as output:
                    programs.append(
                        subprocess.Popen(
                            [*enter, *torchrun, str(script), *arguments],
                            env=environment,
                            stdout=output,
                            stderr=subprocess.STDOUT,
                        )
                    )
            try:
                deadline = time.monotonic() + timeout_s
                codes = [program.wait(max(0.1, deadline - time.monotonic())) for program in programs]
            except subprocess.TimeoutExpired:
                codes = [-1]
            finally:
                for program in programs:
                    program.kill()
                    program.wait()
            if any(codes):
                said = "\n".join(f"--- {path.stem}\n{first_cause(path.read_text())}" for path in outputs)
                raise RuntimeError(f"ranks failed, or did not end within {timeout_s:g} s:\n{said}")


def first_cause(output: str) -> str:
    """Return the part of a program's output that tells why it failed; torchrun's own summary comes behind it."""
    start = max(0, output.find("Traceback"))
    return output[start : start + 3000]


def on_the_wire(payload_bytes: float) -> float:
    """Return the bytes that an interface counts for so much payload, headers with it."""
    return payload_bytes * (1 + HEADER_BYTES / PAYLOAD_BYTES)


def compare(
    num_nodes: int, ranks_per_node: int, rate_mbit: float, num_elements: int, repetitions: int
) -> dict[str, Any]:
    """Measure one round among all ranks in each of the ways, in turn, in one run."""
    with Network(num_nodes, rate_mbit) as network, tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        arguments = (str(num_elements), str(repetitions), str(figures))
        network.torchrun(ranks_per_node, HERE / "network_rounds.py", *arguments, timeout_s=300)
        ways: dict[str, Any] = json.loads(figures.read_text())
    # Float32 once out of each node and once in; of codes, with their scales, as many bytes as the codec promises.
    share = 2 * (num_nodes - 1) / num_nodes * num_elements
    promised = {"Cast(bfloat16)": 2.0, "Int8": 1 + 4 / 128, "Int4": 0.5 + 4 / 128}
    for way, one in ways.items():
        one["promised_bytes"] = on_the_wire(share * promised.get(way, 4.0))
    minimum = on_the_wire(share * 4)
    return {
        "nodes": num_nodes,
        "ranks_per_node": ranks_per_node,
        "rate_mbit": rate_mbit,
        "elements": num_elements,
        "minimum_bytes": minimum,
        "limit_seconds": minimum * 8 / (rate_mbit * 1e6),
        "ways": ways,
    }


def show(result: dict[str, Any], console: Console) -> None:
    title = (
        f"one round: {result['nodes']} nodes x {result['ranks_per_node']} ranks, "
        f"{result['elements'] / 1e6:g} million float32, {result['rate_mbit']:g} Mbit/s"
    )
    table = Table("way", "seconds", "/ torch", "/ link's limit", "bytes / promised", title=title)
    for way, figures in result["ways"].items():
        table.add_row(
            way,
            f"{figures['seconds']:.3f}",
            f"{figures['seconds'] / result['ways']['torch']['seconds']:.2f}",
            f"{figures['seconds'] / (figures['promised_bytes'] * 8 / (result['rate_mbit'] * 1e6)):.2f}",
            f"{figures['bytes'] / figures['promised_bytes']:.3f}",
        )
    console.print(table)


def overlap(num_elements: int, repetitions: int) -> dict[str, Any]:
    """Measure delayed rounds in each of the ways of `network_overlap.py`, in one run."""
    with Network(2, 200) as network, tempfile.TemporaryDirectory() as temporary:
        figures = Path(temporary) / "figures.json"
        arguments = (str(num_elements), str(repetitions), str(figures))
        network.torchrun(2, HERE / "network_overlap.py", *arguments, timeout_s=400)
        results: dict[str, Any] = json.loads(figures.read_text())
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "network-overlap.json").write_text(json.dumps(results, indent=2) + "\n")
    return results


def show_overlap(results: dict[str, Any], console: Console) -> None:
    title = "a delayed round: 2 nodes x 2 ranks, 8 million float32, 200 Mbit/s"
    columns = ("way", "blocking, s", "send, s", "land, s", "held / blocking", "rate kept")
    table = Table(*columns, title=title)
    for way, figures in results.items():
        held = (figures["send"] + figures["land"]) / figures["blocking"]
        seconds = (f"{figures[name]:.3f}" for name in ("blocking", "send", "land"))
        table.add_row(way, *seconds, f"{held:.3f}", f"{figures['rate']:.2f}")
    console.print(table)


def train(folder: Path, num_steps: int) -> dict[str, Any]:
    """Train the demo's model in each of the ways of `network_training.py`, in one run."""
    with Network(2, TRAINING_MBIT) as network, tempfile.TemporaryDirectory() as temporary:
        figures = Path(temporary) / "figures.json"
        network.torchrun(2, HERE / "network_training.py", str(num_steps), str(figures), timeout_s=1500)
        results: dict[str, Any] = json.loads(figures.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "network-training.json").write_text(json.dumps(results, indent=2) + "\n")
    return results


def show_training(results: dict[str, Any], num_steps: int, console: Console, picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    title = f"{num_steps} steps on 2 nodes x 2 ranks, {TRAINING_MBIT} Mbit/s"
    table = Table("way", "seconds", "steps sooner than data parallel", "validation loss", title=title)
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    slowest = results["data parallel"]["seconds"]
    for way, result in results.items():
        losses = [one["loss"] for one in result["curve"]]
        table.add_row(way, f"{result['seconds']:.1f}", f"{slowest / result['seconds']:.1f}", f"{losses[-1]:.4f}")
        axes.plot([one["seconds"] for one in result["curve"]], losses, marker="o", label=way)
    axes.set(xlabel="seconds of training", ylabel="validation loss (nats a byte)", xscale="log", title=title)
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(picture, dpi=120)
    console.print(table)
    print(f"picture: {picture}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model and one size of cluster")
    parser.add_argument("--overlap", action="store_true", help="measure delayed rounds instead")
    parser.add_argument("--training", action="store_true", help="train a model instead, over a slower link")
    parser.add_argument("--json", type=Path, default=RESULTS / "network.json", help="where to write the figures")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    clusters = [(2, 2, 200, 400_000, 3)] if options.quick else [(2, 2, 200, 8_000_000, 5), (4, 2, 200, 8_000_000, 3)]
    console = Console(width=110)
    results = []
    try:
        if options.overlap:
            show_overlap(overlap(8_000_000, 5), console)
            return 0
        if options.training:
            show_training(train(RESULTS, TRAINING_STEPS), TRAINING_STEPS, console, RESULTS / "network-training.png")
            return 0
        for cluster in clusters:
            results.append(compare(*cluster))
            show(results[-1], console)
    except NetworkUnavailableError as error:
        print(f"no network of nodes can be made here: {error}", file=sys.stderr)
        return 2
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
