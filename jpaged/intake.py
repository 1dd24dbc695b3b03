"""From a request to the group that the scheduler moves: its rank, its salt, its sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from jpaged import groups
from jpaged.asked import Asked
from jpaged.config import EngineConfig
from jpaged.groups import Group
from jpaged.hypotheses import Beam, BeamRequest
from jpaged.prefix import Chain
from jpaged.request import Request, Sample

AnyRequest: TypeAlias = Request | BeamRequest
AnySample: TypeAlias = Sample | Beam


def check_new(requests: Sequence[AnyRequest]) -> None:
    """Whether requests can be queued, each of them once.

    Raises:
      ValueError: one is no request, was queued before, or is over.
    """
    for number, request in enumerate(requests):
        if not isinstance(request, Asked):
            kind = type(request).__name__
            raise ValueError(f"requests must be what LLM.make_requests or make_searches makes, not {kind}")
        if request.metrics is not None or request.finished or request in requests[:number]:
            raise ValueError(f"request {request.id} was added before, or is over; try a new one")


def group_of(
    request: AnyRequest, config: EngineConfig, hash: Callable[[bytes], bytes], *, arrival: int, now: float
) -> Group:
    """The group of a request that has passed `validate`.

    Args:
      request: The request.
      config: The engine's settings.
      hash: By which the prefix cache finds blocks.
      arrival: Its number in the order of arrival.
      now: When it came, in seconds.
    """
    rank: tuple[float, ...] = (arrival,)
    if config.scheduling_policy == "priority":  # who came so much earlier is worth a level: nobody starves
        rank = (request.priority * config.priority_ageing + now, arrival)
    ids = request.prompt_token_ids
    group = Group(
        rank=rank,
        reads_cache=isinstance(request, BeamRequest) or request.params.prompt_logprobs is None,
        are_beams=isinstance(request, BeamRequest),
        fork_len=len(ids),
    )
    # An engine has one model, so the cache of an engine is a model's, and only tenants are to be told apart.
    salt = b"" if request.cache_salt is None else request.cache_salt.encode("utf-8", "surrogatepass")
    if not config.enable_prefix_caching:
        salt = b"%d" % arrival
    chain = Chain(config.block_size, salt, hash)
    chain.extend(ids)
    most = len(ids) + request.max_tokens - 1
    for sample in request.samples:
        sequence = groups.Sequence(sample, group, chain.twin(), len(ids), most, is_twin=sample.index > 0)
        group.sequences.append(sequence)
    return group
