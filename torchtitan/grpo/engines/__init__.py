"""The trainer's side of inference servers: vLLM, SGLang and the embedded one.

    registry.py        one row per engine (engine.py): control, client, weight-sync links; the place to add another
    server.py          one server, as the trainer knows it
    fleet_view.py      the servers of a run, as those who send requests see them
    fleet.py           the same, as weight sync changes them, and their list, which may change
    fleet_mirror.py    the same servers as another process sees them, and who tells it
    push_report.py     what a push of weights was like, for the metrics
    protocol.py        what every client offers: token ids in, tokens and log-probabilities out
    stop_strings.py    texts that end an answer
    http_client.py     generation, asynchronous, for the collector; vllm.py and sglang.py are the engines' clients
    sglang_adapters.py both, for a SGLang that gets LoRA adapters
    http_control.py    control routes, for threads; vllm_control.py and sglang_control.py are the engines' controls
    whole_replies.py   HTTP connections on which a server that drips bytes holds no call
    embedded/          a server of our own, with vLLM's routes

rollouts/ asks the fleet for servers and calls their clients. weight_sync/ pauses, updates and resumes servers through
their controls, then admits them to the fleet with a version. This folder imports neither of the two.
"""
