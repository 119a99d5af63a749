"""Between the agent loops and the replicas: which replica answers, how long it may take, how many at once.

In:  request_id, prompt_ids, SamplingParams -> Out: TokenOutput.
Simplified: the balancer is an object in this event loop, where verl's is a Ray actor that all workers share.
Timeout, retries and the bound in flight are minirl's own.
verl: verl.workers.rollout.llm_server:LLMServerClient
"""

import asyncio
from collections import OrderedDict
from collections.abc import Collection
from uuid import uuid4

from omegaconf import DictConfig

from minirl.rollout.sampling import SamplingParams
from minirl.rollout.server import ReplicaError, RolloutServer, TokenOutput

DEFAULT_ROUTING_CACHE_SIZE = 10000


class GlobalRequestLoadBalancer:
    """Least requests in flight; a request id seen before goes back to its server, whose cache has its prefix.

    verl: verl.workers.rollout.llm_server:GlobalRequestLoadBalancer
    """

    def __init__(
        self, servers: dict[str, RolloutServer], max_cache_size: int = DEFAULT_ROUTING_CACHE_SIZE
    ) -> None:
        if not servers:
            raise ValueError("servers must be non-empty")
        self._servers = dict(servers)
        self._inflight_requests = dict.fromkeys(servers, 0)
        self._request_id_to_server: OrderedDict[str, str] = OrderedDict()  # least recently used first
        self._max_cache_size = max_cache_size

    def acquire_server(self, request_id: str, *, exclude: Collection[str] = ()) -> tuple[str, RolloutServer]:
        """(server_id, server), counted as one request in flight until `release_server`.

        Args:
            exclude: servers that failed this request; taken all the same when there is no other.
        """
        server_id = self._request_id_to_server.get(request_id)
        if server_id is None or server_id in exclude:
            others = [name for name in self._servers if name not in exclude] or list(self._servers)
            server_id = min(others, key=self._inflight_requests.__getitem__)
        self._request_id_to_server[request_id] = server_id
        self._request_id_to_server.move_to_end(request_id)
        if len(self._request_id_to_server) > self._max_cache_size:
            self._request_id_to_server.popitem(last=False)
        self._inflight_requests[server_id] += 1
        return server_id, self._servers[server_id]

    def release_server(self, server_id: str) -> None:
        """One request less in flight; never below 0."""
        self._inflight_requests[server_id] = max(0, self._inflight_requests[server_id] - 1)

    def get_inflight_count(self, server_id: str) -> int:
        return self._inflight_requests[server_id]


class LLMServerClient:
    """What an agent loop talks to.

    Args:
        config: `minirl.rollout`.

    verl: verl.workers.rollout.llm_server:LLMServerClient
    """

    def __init__(self, config: DictConfig, load_balancer: GlobalRequestLoadBalancer) -> None:
        self.timeout = config.timeout
        self.max_retries = config.max_retries
        self._load_balancer = load_balancer
        self._in_flight = asyncio.Semaphore(config.max_in_flight)

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: SamplingParams,
        max_tokens: int,
        seed: int,
    ) -> TokenOutput:
        """Ask one replica, then others.

        Args:
            request_id: of the whole conversation: its turns go to one replica, which has their prefix cached.

        Raises:
            TimeoutError, ReplicaError: the last of 1 + `max_retries` replicas did not answer.
        """
        failed: list[str] = []
        async with self._in_flight:  # waiting for a free place does not count as time to answer
            while True:
                server_id, server = self._load_balancer.acquire_server(request_id, exclude=failed)
                try:
                    async with asyncio.timeout(self.timeout):
                        return await server.generate(
                            prompt_ids,
                            sampling_params,
                            request_id=uuid4().hex,  # a new one for every turn and try
                            max_tokens=max_tokens,
                            seed=seed,
                        )
                except (TimeoutError, ReplicaError) as error:
                    failed.append(server_id)
                    if len(failed) > self.max_retries:
                        raise self._give_up(failed, error) from error
                finally:
                    self._load_balancer.release_server(server_id)

    def _give_up(self, failed: list[str], error: Exception) -> Exception:
        asked = f"asked {', '.join(failed)} (1 + minirl.rollout.max_retries={self.max_retries} tries)"
        if isinstance(error, TimeoutError):
            return TimeoutError(
                f"no response within minirl.rollout.timeout={self.timeout} seconds; {asked}: raise "
                "it, or lower minirl.rollout.max_in_flight so that a replica has less to do at once"
            )
        return ReplicaError(f"{error}; {asked}")
