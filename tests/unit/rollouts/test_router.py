"""What the router keeps of servers."""

import asyncio
import gc
import weakref
from types import SimpleNamespace

from torchtitan.grpo.engines.fleet import Fleet
from torchtitan.grpo.engines.protocol import Completion, SamplingParams
from torchtitan.grpo.engines.server import Server
from torchtitan.grpo.rollouts.group_call import GroupCall
from torchtitan.grpo.rollouts.places import Places
from torchtitan.grpo.rollouts.router import Router


class Client:
    """Answers when it may, and notes that it was closed."""

    def __init__(self) -> None:
        self.may_answer, self.closed = asyncio.Event(), False

    async def generate(self, *_: object) -> list[Completion]:
        await self.may_answer.wait()
        return [Completion([1], [0.0], "stop", [0])]

    async def close(self) -> None:
        self.closed = True


def test_nothing_is_kept_of_servers_that_have_left_the_list(tmp_path) -> None:
    """One that still answers keeps its connection until it has. When each was busy is told afterwards."""
    path, rounds, made, clients = tmp_path / "urls", 200, [], []

    async def servers_come_and_go() -> None:
        loop, params = asyncio.get_running_loop(), SamplingParams(1, 1.0, 4)
        path.write_text("http://kept\n")
        fleet = Fleet([], lambda url: Server(url, None, Client()), urls_file=str(path))
        router = Router(Places(fleet, 4, 10.0, loop))
        fleet.add_listener(lambda: loop.call_soon(router.look_at_fleet))
        before: asyncio.Task | None = None
        for number in range(rounds):
            path.with_suffix(".new").write_text(f"http://kept\nhttp://{number}\n")
            path.with_suffix(".new").rename(path)
            (server,), removed = fleet.reread()
            made.append(weakref.ref(server))
            clients.append(server.client)
            fleet.admit(server, number)
            answer = router.answer(SimpleNamespace(index=0), [1], params, "r", GroupCall(lambda at=number: at), None)
            asked = asyncio.create_task(answer)
            await asyncio.sleep(0)
            assert server.in_flight == 1
            if before is not None:  # it is under way at the server that has left
                assert removed[0].in_flight == 1 and not clients[-2].closed
                clients[-2].may_answer.set()
                await before
            before = asked
            del server, removed
            fleet.admit(fleet.servers[0], number)  # the next change
            await asyncio.sleep(0.001)
        assert [client.closed for client in clients] == [True] * (rounds - 1) + [False]
        gc.collect()
        assert sum(server() is not None for server in made) <= 2
        spans = router.places.take_busy_spans()
        assert sum(len(of_one) for of_one in spans.values()) == rounds == len(spans)
        clients[-1].may_answer.set()
        await before
        await router.close()

    asyncio.run(servers_come_and_go())
