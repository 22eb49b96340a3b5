"""An OpenAI-compatible endpoint of the run, for environments and harnesses that speak HTTP.

    server.py      `Endpoint`: the aiohttp server on the collector's event loop; `serve` starts it
    sessions.py    `Session`: what one conversation sampled, as samples with the exact tokens
    chat.py        messages and texts to token ids, without tokenizing again what was sampled; tool calls
    episodes.py    `Episodes`: what a harness outside takes, plays and posts rewards for
    requests.py    which fields a call may have, and replies

An environment calls `client.endpoint.session(client, prompt)`, gives `session.base_url` to whatever speaks OpenAI's
protocol, and returns `session.samples()`. docs/endpoint.md has examples.
"""
