"""The nodes of a launch decide together what their workers do, as soon as they have met and before workers start.

Torchrun's rendezvous gives each agent its rank among the nodes and a store that all of them reach. There each node
tells its budget, or why it has none, and its devices. Of the nodes with the same devices one decides, with the smallest
budget of all: the first that has decided in an earlier round of this launch, else the first. It has the trial run and
the solver; what it decides, a refusal too, goes to the others over the store. So all end with the same plan or with the
same error, whichever of them has a warm cache, and workers that are restarted, also on fewer or more nodes, keep their
plan. Workers are started once all nodes know it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from monetrun.core import codec
from monetrun.core.budget import BYTES, SHARE_OF_PLAIN, Budget, is_auto, resolve, smallest
from monetrun.core.errors import DeviceQueryFailed, InfeasibleBudget, MonetrunError, NoPlanInTime
from monetrun.launcher import keys, memory, report, sources
from monetrun.launcher.decision import Decision, one_for_all
from monetrun.launcher.job import Job, as_it_is
from monetrun.launcher.progress import status
from monetrun.launcher.ranks import Ranks
from monetrun.launcher.restart import (
    Shortage,
    forget_reports,
    has_lasted,
    ran_short_early,
    relieved,
    shortage_of,
)
from monetrun.machine.device import query
from monetrun.planning import planner
from monetrun.runtime import exchange
from monetrun.runtime.exchange import Refusal

# A node of the round that says nothing for so long has ended. One that decides says every few seconds that it lives.
_SILENCE_SECONDS = 60.0
_SIGN_OF_LIFE_SECONDS = 5.0

# How often the nodes meet anew because one has ended meanwhile.
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Offer:
    """What a node tells the others.

    Attributes:
        budget: its own, in bytes where it is no share of the plain peak; as it was given where it has none in bytes.
        devices: plans can be passed on among nodes for which this is the same.
        decided: in an earlier round of the launch.
        refusal: why it has no budget.
        shortage: memory has run out in the first steps of its workers.
    """

    budget: Budget
    devices: str
    decided: bool
    refusal: Refusal | None = None
    shortage: Shortage | None = None


class NodeLost(Exception):
    """A node of the round has ended before all had decided."""


class Nodes:
    """One node among those of its launch.

    Args:
        job: of this node.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._budget: Budget | None = None  # as first offered: what is free changes with restarts
        self._refusal: Refusal | None = None  # in place of a budget
        self._decision: Decision | None = None
        self._followed: Decision | None = None
        self._environment: Mapping[str, str] = {}  # of the workers that were started last
        self._shortage: Shortage | None = None  # in their first steps
        self._lost = 0

    def joined(self, store: Any, rank: int, size: int, fixed: bool, ended: int = 0) -> Mapping[str, str] | None:
        """The nodes have met: agree with them, and give the variables of this node's workers.

        Args:
            store: that all nodes reach.
            rank: of this node among them.
            size: how many they are.
            fixed: they do not meet anew: a node whose workers start again is alone with that.
            ended: with what this node's workers have failed that were started before, else 0.

        Returns:
            None where a node was lost, so that the nodes have to meet anew.

        Raises:
            MonetrunError: what a node that decides raised; the same on all nodes.
        """
        from torch.distributed import DistError  # imported here: slow

        self._job.node = rank
        short = not fixed and ran_short_early(self._environment, ended)
        self._shortage = shortage_of(self._environment) if short else self._shortage
        forget_reports(self._environment)  # of former workers, which may have come further than those that start now
        if fixed and self._followed is not None:
            return self._job.follow(self._followed, shown=False)
        try:
            # of a static rendezvous a node passes before all have come: they are waited for as torchrun waits
            patience = store.timeout.total_seconds() if fixed else _SILENCE_SECONDS
            self._decision = decision = self._agreed(store, rank, size, patience)
            self._shortage = None
            self._start_together(store, rank, size)
        except NodeLost as lost:
            self._lost += 1
            if fixed or self._lost >= _ROUNDS:
                raise MonetrunError(str(lost), "start every node with monetrun, and look at its own messages") from lost
            return None
        except DistError as error:
            message = "the node that has the rendezvous's store ended before all nodes had a plan"
            raise MonetrunError(message, "its own messages say why") from error
        shown, self._followed = self._followed != decision, decision
        self._lost = 0
        self._job.met(decision.nodes)
        if shown and self._job.plan is not decision.plan:  # another node has decided
            if not decision.tightened:  # else once it has lasted
                _keep(self._job, decision)
            if self._job.options.plan_file and not decision.plan_given:
                report.warn(f"--plan {self._job.options.plan_file} is not used: another node decides")
        self._environment = self._job.follow(decision, shown=shown)
        return self._environment

    def keep(self, exit_code: int) -> None:
        """After the launch: keep a tighter plan for the next one, if training went on with it."""
        decision = self._followed
        if decision is not None and decision.tightened and has_lasted(self._environment, exit_code):
            _keep(self._job, decision)

    def _agreed(self, store: Any, rank: int, size: int, patience: float) -> Decision:
        mine = self._offer(rank)
        exchange.post(store, f"monetrun/offer/{rank}", codec.dumps(mine))
        offers: list[Offer] = []
        for k in range(size):
            if not _posted_in_time(store, f"monetrun/offer/{k}", patience):
                raise NodeLost(f"node {k} has not said in {patience:.0f} s how much memory it has")
            offers.append(codec.loads(Offer, exchange.read(store, f"monetrun/offer/{k}")))
        deciders: dict[str, int] = {}  # of all nodes with the same devices
        for k in sorted(range(size), key=lambda k: not offers[k].decided):
            deciders.setdefault(offers[k].devices, k)
        decision = self._decide(store, rank, offers) if deciders[mine.devices] == rank else None
        for decider in sorted(deciders.values()):
            self._wait_for(store, decider)
            verdict = json.loads(exchange.read(store, f"monetrun/verdict/{decider}"))
            if verdict is not None:
                exchange.leave_together(store, "monetrun/left", size)
                raise codec.from_plain(Refusal, verdict).error()
        if decision is not None and len(deciders) == 1:
            return decision
        decisions = {
            k: codec.loads(Decision, exchange.read(store, f"monetrun/decision/{k}")) for k in sorted(deciders.values())
        }
        return one_for_all([*decisions.values()]) or decision or decisions[deciders[mine.devices]]

    def _offer(self, rank: int) -> Offer:
        """What this node tells the others. Its budget stays as it was first: what is free changes with restarts."""
        if self._budget is None:
            self._budget = self._job.budget
            try:
                self._budget = _offered_budget(self._job)
            except MonetrunError as error:
                self._refusal = Refusal(error.exit_code, f"node {rank}: {error.message}", error.hint)
        return Offer(
            self._budget, _signature(self._job.ranks), self._decision is not None, self._refusal, self._shortage
        )

    def _start_together(self, store: Any, rank: int, size: int) -> None:
        """Wait until all nodes know what was decided, and are about to start their workers: these need all of them."""
        exchange.post(store, f"monetrun/ready/{rank}", "")
        for k in range(size):
            if not _posted_in_time(store, f"monetrun/ready/{k}"):
                raise NodeLost(f"node {k} ended before it had started its workers")

    def _decide(self, store: Any, rank: int, offers: Sequence[Offer]) -> Decision | None:
        """Decide, and post it, or the refusal."""
        decision: Decision | None = None
        refusal: Refusal | None = None
        try:
            with _signs_of_life(store, rank):
                decision = self._decided(offers)
            exchange.post(store, f"monetrun/decision/{rank}", codec.dumps(decision))
        except MonetrunError as error:
            refusal = Refusal.of(error)
        except Exception as error:
            exchange.post(store, f"monetrun/verdict/{rank}", codec.dumps(Refusal(70, f"node {rank}: {error!r}", "")))
            raise
        exchange.post(store, f"monetrun/verdict/{rank}", json.dumps(codec.to_plain(refusal)))
        return decision

    def _decided(self, offers: Sequence[Offer]) -> Decision:
        """What this launch has decided before; anew where budgets are smaller than that, or memory has run out."""
        earlier = self._decision
        if earlier is None:
            return self._decided_first(offers)
        if earlier.plan is None:
            return earlier
        budget = smallest([offer.budget for offer in offers if offer.refusal is None])
        if _is_smaller(budget, earlier) and (smaller := self._decided_anew(budget, earlier)) is not None:
            return smaller
        devices = offers[self._job.node].devices
        shortages = [o.shortage for o in offers if o.shortage is not None and o.devices == devices]
        most = max(shortages, key=lambda shortage: shortage.needed_bytes, default=None)
        return earlier if most is None else relieved(self._job, earlier, most)

    def _decided_anew(self, budget: Budget, earlier: Decision) -> Decision | None:
        """A decision for a ``budget`` that is smaller than the ``earlier`` one, if there is such a plan."""
        _take(self._job, _stated(budget))
        try:
            return replace(self._job.decide(), nodes=self._job.ranks.nodes)
        except (InfeasibleBudget, NoPlanInTime) as refused:
            report.warn(f"{refused.message}; training has begun, and goes on as it was decided then")
            _take(self._job, earlier.budget)
            return None

    def _decided_first(self, offers: Sequence[Offer]) -> Decision:
        self._job.met(len(offers))
        for offer in offers:
            refusal = offer.refusal
            if refusal is None:
                continue
            nothing_left = is_auto(offer.budget) and refusal.exit_code == memory.NothingLeft.exit_code
            decision = as_it_is(self._job, refusal.message) if nothing_left else None
            if decision is None or not is_auto(self._job.budget):
                raise refusal.error()
            return replace(decision, nodes=len(offers))
        budget = smallest([offer.budget for offer in offers])
        _take(self._job, budget if all(is_auto(offer.budget) for offer in offers) else _stated(budget))
        return replace(self._job.decide(), nodes=self._job.ranks.nodes)

    def _wait_for(self, store: Any, decider: int) -> None:
        verdict, alive = f"monetrun/verdict/{decider}", f"monetrun/alive/{decider}"
        if exchange.is_posted(store, verdict):
            return
        seen, since = b"", time.monotonic()

        def is_over() -> bool:
            nonlocal seen, since
            sign = bytes(store.get(alive)) if exchange.is_posted(store, alive) else b""
            if sign != seen:
                seen, since = sign, time.monotonic()
            return exchange.is_posted(store, verdict) or time.monotonic() - since > _SILENCE_SECONDS

        with status(self._job.console, f"waiting for the plan of node {decider}", shown=not self._job.options.quiet):
            exchange.wait_until(is_over, float("inf"))
        if not exchange.is_posted(store, verdict):
            raise NodeLost(f"node {decider} ended before it had a plan")


def _posted_in_time(store: Any, key: str, seconds: float | None = None) -> bool:
    return exchange.wait_until(lambda: exchange.is_posted(store, key), seconds or _SILENCE_SECONDS)


def _offered_budget(job: Job) -> Budget:
    """The budget of this node: in bytes, unless it is a share of the plain peak."""
    nbytes = job.budget_bytes()
    return job.budget if nbytes is None else Budget(BYTES, float(nbytes), job.budget.text)


def _stated(budget: Budget) -> Budget:
    """``budget`` as if bytes had been given: for ``auto`` models may run as they are, which here run under a plan."""
    return replace(budget, text=f"{budget.value:.0f}B") if budget.kind == BYTES else budget


def _is_smaller(budget: Budget, earlier: Decision) -> bool:
    plan = earlier.plan
    if plan is None or earlier.plan_given:
        return False
    plain_bytes = plan.plain_peak_bytes if plan.pool is None else plan.pool.plain_bytes
    return resolve(budget, None, plain_bytes) < plan.budget_bytes


def _take(job: Job, budget: Budget) -> None:
    """Have ``job`` plan with the budget of all nodes."""
    job.budget = budget
    if budget.kind == SHARE_OF_PLAIN:  # its text is a part of the plan's key in the cache
        limit = f" up to {budget.at_most_bytes}" if budget.at_most_bytes else ""
        job.options = replace(job.options, budget=f"{budget.text}{limit}")


def _keep(job: Job, decision: Decision) -> None:
    """Keep what was decided, by another node too, in this node's cache: this node may decide at the next launch."""
    store = job.store
    if store is None or decision.plan is None or decision.record is None or decision.plan_given:
        return
    if decision.sources is not None:
        job.record_key = sources.keep(store, job.base_key, decision.sources)
    elif job.record_key == job.base_key:
        return  # for what the record holds is not known here
    _take(job, decision.budget)
    store.put("probe", job.record_key, decision.record)
    plan_key = keys.plan_key(job.options, job.record_key, job.budget_bytes(), decision.record)
    plan = planner.of_step(decision.record, decision.plan) if decision.tightened else decision.plan
    store.put("plan", plan_key, plan)


def _signature(ranks: Ranks) -> str:
    """What decides the graphs that are captured, and what they need of a device."""
    sizes: set[int] = set()
    with contextlib.suppress(DeviceQueryFailed):  # only a budget of what is free needs it, and says so
        sizes = {info.total_bytes for info in query(ranks.kind, ranks.local)} if ranks.kind == "cuda" else sizes
    return f"{ranks.kind} {sorted(sizes)}, torch {importlib.metadata.version('torch')}"


@contextlib.contextmanager
def _signs_of_life(store: Any, rank: int) -> Iterator[None]:
    ended = threading.Event()

    def show() -> None:
        count = 0
        while not ended.is_set():
            with contextlib.suppress(RuntimeError):  # the store has gone: the main thread finds out
                store.set(f"monetrun/alive/{rank}", str(count))
            count += 1
            ended.wait(_SIGN_OF_LIFE_SECONDS)

    thread = threading.Thread(target=show, name="monetrun-alive", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
