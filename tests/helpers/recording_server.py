"""The embedded server, with the same flags, that also writes down what it is asked and which weights it has.

Lines of the file that the environment variable RECORD names: {"time", "did", "version"}, with `did` one of `started`,
`checked` or `asked` (a request came while it had `version`) and `took` (it has `version` from now on).

While that file's name with `.drift` exists, each log-probability that it answers to a run is 1 nat too low. The server
removes that file when it is checked, if it is not empty.
"""

import json
import os
import time
from pathlib import Path

from aiohttp import web

from torchtitan.grpo.engines.embedded import __main__ as embedded
from torchtitan.grpo.engines.embedded import bodies
from torchtitan.grpo.engines.embedded.generator import Request
from torchtitan.grpo.engines.embedded.server import EmbeddedApp


def write_down(did: str, version: str) -> None:
    line = json.dumps({"time": time.time(), "did": did, "version": version.partition("@")[0]}) + "\n"
    with open(os.environ["RECORD"], "a") as record:
        record.write(line)


def reply_with_drift(request: Request, model_name: str) -> dict:
    reply = own_reply(request, model_name)
    if request.flat_logprobs and os.path.exists(os.environ["RECORD"] + ".drift"):
        for choice in reply["choices"]:
            choice["token_logprobs"] = [logprob - 1 for logprob in choice["token_logprobs"]]
    return reply


own_reply = bodies.reply


class RecordingApp(EmbeddedApp):
    async def generate(self, http: web.Request) -> web.Response:
        # The check before a server is taken up asks without a request id; what a run asks has one.
        did = "asked" if "request_id" in await http.json() else "checked"
        drift = Path(os.environ["RECORD"] + ".drift")
        if did == "checked" and drift.exists() and drift.read_text():
            drift.unlink()
        write_down(did, self.generator.version)
        return await super().generate(http)

    def _serve(self, version: str, resume: bool) -> None:
        super()._serve(version, resume)
        write_down("took", version)


if __name__ == "__main__":
    write_down("started", "")
    embedded.EmbeddedApp, bodies.reply = RecordingApp, reply_with_drift
    embedded.main()
