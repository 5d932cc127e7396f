"""Uses of the public API that mypy checks in strict mode; nothing here is run."""

from __future__ import annotations

import torch

import averagers


def loop(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    events: list[averagers.Event] = []
    averager = averagers.PeriodicModelAverager(4, 100, None, observers=[events.append], timeout_s=60)
    averager.average_parameters(model.parameters())
    averager.average_parameters(model.named_parameters())
    averager.average_parameters(optimizer.param_groups, weight=32)
    averager.finish(model.parameters())
    with averager.averaged(model.parameters()):
        pass
    averager.load_state_dict(averager.state_dict())
    averager.close()
    return averager.step + averager.period + averager.warmup_steps


def hierarchy(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
    averager = averagers.HierarchicalModelAverager({4: 8, 16: 64}, warmup_steps=100, measure_drift=True)
    with averagers.attach(optimizer, averager, module=model) as handle:
        handle.finish()
    handle.remove()
    wrapped: torch.optim.Optimizer = averagers.ModelAveragingOptimizer(optimizer, averager)
    wrapped.step()
    averagers.average_parameters(model.parameters(), averager.process_group)


def hook(model: torch.nn.parallel.DistributedDataParallel, averager: averagers.ModelAverager) -> None:
    model.register_comm_hook(averagers.PostLocalSGDState(averager), averagers.post_local_sgd_hook)


def observe(event: averagers.Event) -> float | None:
    return event.drift if isinstance(event, averagers.RoundFinished) else None


class Mine(averagers.ModelAverager):
    def average_parameters(self, params: object) -> None:
        self.step += 1


mine: averagers.ModelAverager = Mine()
failure: type[RuntimeError] = averagers.RoundFailedError


def fewer_bytes(model: torch.nn.Module) -> averagers.DistributedState:
    rules: list[averagers.Rule] = [averagers.Median(), averagers.TrimmedMean(1), averagers.CenteredClipping(0.1)]
    averager = averagers.HierarchicalModelAverager({4: 8}, codec={4: averagers.Int8()}, rule={4: rules[0]})
    codecs: list[averagers.Codec] = [averagers.TopK(64), averagers.Int4(error_feedback=0.95)]
    averagers.PeriodicModelAverager(4, codec=codecs[0]).close()
    return averagers.DistributedState(averager, model.named_parameters())
