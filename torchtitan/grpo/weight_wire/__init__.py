"""Both ends of the wire: the trainer imports it, and so does every server. It needs torch and safetensors only.

    buckets.py         the plan: which tensor travels at which byte of which bucket; trailers and checksums
    checksum_kernel.py the checksum in one pass over a GPU's memory (Triton)
    transports.py      TRANSPORTS: one row for each way that weights take
    transport.py       a process group between trainer rank 0 and one server, with bounded waits
    rendezvous.py      where the ranks of such a group meet, and how either end gives that up
    shared_memory.py   the same group within one machine: the server reads the trainer's own buckets (transport "ipc")
    shared_buffers.py  memory that another process can map: memfd, CUDA IPC
    receiver.py        the server's end: receive buckets, verify each, hand the tensors to the engine, acknowledge
    adapters.py        LoRA: how adapters apply, and fingerprints of the weights that they belong to
    bucket_files.py    a bucket as a safetensors file, for transport "disk"
    version_names.py   what a version is called, which no other run's is
    model_identity.py  what both ends tell of their model, and whether it is the same
    refusals.py        how a server says why it refuses, if the user can mend it

The trainer computes the plan once and sends it when it connects. A version is then its buckets, in order, and one
acknowledgement. The trainer's end is weight_sync/. The server's end is in inside_vllm/ and engines/embedded/.
"""
