"""The embedded server: one model of transformers behind vLLM's routes, started with a run or by hand.

    __main__.py        its command line
    server.py          HTTP routes: answers requests, gathers cohorts, takes weight updates (weight_wire/receiver.py)
    bodies.py          what is in a request's body, checked, and in a reply's
    worker.py          the thread that owns generator and model; a pause takes effect between two of its steps
    generator.py       continuous batching: rows join and leave between two forward passes
    scoring.py         log-probabilities of given tokens, for a trainer to which this server is a teacher
    kv_cache.py        keys and values of the running rows, and how much memory they may take
    routing.py         which experts a mixture of experts has chosen, for routing replay
    sampling.py        noise per row and position, so that seeded answers repeat in any batch
    model.py           loads the model, and takes one version's tensors into it
    sleep.py           gives its memory up while a trainer on the same device trains
    adapters.py        LoRA: adapters beside the model's layers, on the trainer's base only

A request goes from server.py to worker.py and back. A version goes from server.py through the receiver to model.py.
"""
