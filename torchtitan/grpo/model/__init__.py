"""The policy network: which one, its weights, its shards, and log-probabilities out of packed rows.

    families.py            the table of model families, and what each family's file says (`Family`)
    qwen3, qwen3_moe, qwen2, llama3   one file per family: model class, arguments, adapter, parallelism
    transformers.py        the row of every other dense model: transformers' own class (`hf_model.py`)
      same_packed.py       that class on packed rows against itself, document by document
    experts.py             a mixture of experts: router, experts, and experts on several ranks
    tied_embedding.py      the part of a state-dict adapter that all families share
    hf_config.py           config.json -> family and arguments; refuses what would be computed wrongly
    source.py              `ModelSource`: family, arguments, names; loads and exports weights
      weight_files.py      safetensors files of a folder, found and checked
    lora.py                `[lora]`: adapters beside frozen weights; peft_folder.py writes them as `peft` does
    shards.py              names of sharded and wrapped parameters, and a rank's part of them
    finite.py              weights that are not finite are neither trained nor saved
    parallelize.py         ModelSource + mesh -> a model that is sharded, checkpointed, compiled
    rounded_weights.py     linear layers with weights that are rounded as FP8 servers round them
    mlp_chunks.py          feed-forward layers that compute a row in chunks
    context_parallel.py    rows that several ranks share: positions are cut, and heads in attention
    document_attention.py  attention within each document, with windows and softcaps
    by_document.py         layers that run along a document, such as recurrent states: each document on its own
    documents.py           the documents of a packed row; which positions of equal prefixes are computed once
    replay.py              routing replay: a mixture's routers use the sampler's experts
    packed.py              that model's forward: `Microbatch` -> log-probability and entropy of its answer tokens
    flash_attention.py     which attention kernels;  flash_operator.py: their operator, with shared prompts
    row_kernels.py         Triton kernels for shared prompts' keys and values
    logprobs.py            the loss layer without the full logits
    flops.py               FLOPs of training by the model's formula

config.json -> hf_config -> source -> parallelize -> packed -> policy/. Only a family's own file knows its name.
"""
