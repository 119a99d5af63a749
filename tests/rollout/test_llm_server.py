"""The load balancer's promises, and the client's: timeout, another replica, a bound in flight."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from minirl.rollout.llm_server import GlobalRequestLoadBalancer, LLMServerClient
from minirl.rollout.sampling import SamplingParams
from minirl.rollout.server import ReplicaError, RolloutServer, TokenOutput

SERVERS = ["a", "b", "c"]
events = st.lists(st.tuples(st.sampled_from(["acquire", "release"]), st.integers(0, 8)), max_size=60)


class Replica(RolloutServer):
    """Answers with its name after `seconds`, or raises."""

    version = 0

    def __init__(self, name: int, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.name, self.seconds, self.error = name, seconds, error
        self.ids: list[str] = []
        self.busy = self.most_busy = 0

    async def generate(self, prompt_ids, sampling_params, *, request_id, max_tokens, seed):
        self.ids.append(request_id)
        self.busy += 1
        self.most_busy = max(self.most_busy, self.busy)
        try:
            await asyncio.sleep(self.seconds)
            if self.error is not None:
                raise self.error
            return TokenOutput([self.name], [0.0], "length", 0)
        finally:
            self.busy -= 1

    async def update_weights(self, named_tensors, version): ...
    async def sleep(self): ...
    async def wake_up(self): ...
    async def abort(self, request_ids=None): ...
    async def close(self): ...


def client(*replicas: Replica, **changes) -> LLMServerClient:
    options = dict(timeout=5, max_retries=1, max_in_flight=100) | changes
    balancer = GlobalRequestLoadBalancer({str(replica.name): replica for replica in replicas})
    return LLMServerClient(OmegaConf.create(options), balancer)


def inflight(client: LLMServerClient) -> int:
    balancer = client._load_balancer
    return sum(balancer.get_inflight_count(name) for name in balancer._servers)


async def ask(client: LLMServerClient, request_id: str = "r") -> TokenOutput:
    return await client.generate(
        request_id, prompt_ids=[5], sampling_params=SamplingParams(), max_tokens=4, seed=0
    )


@given(events=events)
def test_balancer_takes_the_least_loaded_and_keeps_a_request_at_its_server(events):
    balancer = GlobalRequestLoadBalancer(dict.fromkeys(SERVERS))
    home: dict[str, str] = {}  # the specification, in plain words
    load = dict.fromkeys(SERVERS, 0)
    open_requests: list[str] = []
    for kind, number in events:
        if kind == "acquire":
            request_id = f"request {number}"
            chosen, _ = balancer.acquire_server(request_id)
            if request_id in home:
                assert chosen == home[request_id]
            else:
                assert load[chosen] == min(load.values())
            home[request_id] = chosen
            load[chosen] += 1
            open_requests.append(chosen)
        elif open_requests:
            server_id = open_requests.pop(number % len(open_requests))
            balancer.release_server(server_id)
            load[server_id] -= 1
        assert {name: balancer.get_inflight_count(name) for name in SERVERS} == load


def test_counts_never_go_below_zero():
    balancer = GlobalRequestLoadBalancer(dict.fromkeys(SERVERS))
    balancer.release_server("a")
    balancer.acquire_server("r")
    assert [balancer.get_inflight_count(name) for name in SERVERS] == [1, 0, 0]


def test_the_least_recently_used_request_is_forgotten():
    balancer = GlobalRequestLoadBalancer(dict.fromkeys(SERVERS), max_cache_size=2)
    assert [balancer.acquire_server(r)[0] for r in ("r0", "r1", "r0", "r2")] == ["a", "b", "a", "c"]
    assert balancer.acquire_server("r0")[0] == "a"  # used later than r1, so still known
    assert balancer.acquire_server("r1")[0] == "b"  # forgotten, and b has the least in flight
    assert len(balancer._request_id_to_server) == 2


def test_a_balancer_without_servers_is_refused():
    with pytest.raises(ValueError, match="non-empty"):
        GlobalRequestLoadBalancer({})


def test_turns_of_a_conversation_go_to_one_replica_under_new_request_ids():
    replicas = [Replica(i) for i in range(3)]
    calls = client(*replicas)

    async def scenario():
        return [(await ask(calls, "talk")).token_ids for _ in range(4)]

    assert asyncio.run(scenario()) == [[0]] * 4
    assert len(set(replicas[0].ids)) == 4 and "talk" not in replicas[0].ids


def test_simultaneous_requests_spread_evenly():
    replicas = [Replica(i, seconds=0.01) for i in range(3)]
    calls = client(*replicas)

    async def scenario():
        await asyncio.gather(*[ask(calls, f"{i}") for i in range(9)])

    asyncio.run(scenario())
    assert [len(replica.ids) for replica in replicas] == [3, 3, 3]


@pytest.mark.parametrize("bad", [Replica(0, seconds=60), Replica(0, error=ReplicaError("process died"))])
def test_a_replica_that_fails_is_left_for_another(bad):
    calls = client(bad, Replica(1), timeout=0.05)

    async def scenario():
        first = await ask(calls, "talk")
        return first, await ask(calls, "talk"), len(bad.ids)

    first, second, asked = asyncio.run(scenario())
    assert first.token_ids == second.token_ids == [1]
    assert asked == 1  # the conversation moved for good
    assert inflight(calls) == 0 and bad.busy == 0  # the silent request was cancelled


def test_without_an_answer_the_error_names_the_key():
    calls = client(Replica(0, seconds=60), Replica(1, seconds=60), timeout=0.02)
    with pytest.raises(TimeoutError, match=r"minirl\.rollout\.timeout=0\.02.*asked 0, 1.*max_retries=1"):
        asyncio.run(ask(calls))
    assert inflight(calls) == 0

    dead = Replica(0, error=ReplicaError("process died"))
    calls = client(dead, max_retries=2)
    with pytest.raises(ReplicaError, match=r"process died; asked 0, 0, 0 .*minirl\.rollout\.max_retries=2"):
        asyncio.run(ask(calls))
    assert len(dead.ids) == 3 and inflight(calls) == 0


def test_an_error_of_ours_is_not_retried():
    replica = Replica(0, error=AssertionError("asleep"))
    calls = client(replica, Replica(1), max_retries=5)
    with pytest.raises(AssertionError, match="asleep"):
        asyncio.run(ask(calls))
    assert len(replica.ids) == 1 and inflight(calls) == 0


@pytest.mark.parametrize("bound", [1, 3])
def test_never_more_requests_at_the_replicas_than_the_bound(bound):
    replica = Replica(0, seconds=0.001)
    calls = client(replica, max_in_flight=bound)

    async def scenario():
        return await asyncio.gather(*[ask(calls, f"{i}") for i in range(12)])

    assert len(asyncio.run(scenario())) == 12
    assert replica.most_busy == bound


def test_waiting_for_a_place_does_not_count_as_time_to_answer():
    calls = client(Replica(0, seconds=0.04), max_in_flight=1, timeout=0.1, max_retries=0)

    async def scenario():
        return await asyncio.gather(*[ask(calls, f"{i}") for i in range(6)])

    assert len(asyncio.run(scenario())) == 6  # 0.24 s in all
