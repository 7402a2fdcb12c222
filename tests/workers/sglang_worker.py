"""A worker of an SGLang server, as far as it takes weights: it joins the trainer's group, and receives flat parts."""

import math
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def serve(pipe) -> None:
    """Do what each (route, body) says, and send the tensors that came with it back."""
    torch.set_num_threads(1)
    pipe.send("ready")
    group = None
    while True:
        route, body = pipe.recv()
        received = {}
        if route == "/init_weights_update_group":
            group = join(body)
        elif route == "/update_weights_from_distributed":
            received = receive(body, group)
        else:
            dist.destroy_process_group(group)
        pipe.send(received)


def join(body: dict) -> dist.ProcessGroup:
    """As SGLang's init_custom_process_group() does."""
    size, rank, name = body["world_size"], body["rank_offset"], body["group_name"]
    address = f"tcp://{body['master_address']}:{body['master_port']}"
    patience = timedelta(seconds=20)
    store, rank, size = next(distributed_c10d.rendezvous(address, rank, size, timeout=patience))
    group, _ = distributed_c10d._new_process_group_helper(
        size,
        rank,
        [],
        dist.Backend(body["backend"]),
        dist.PrefixStore(name, store),
        group_name=name,
        backend_options=None,
        timeout=patience,
    )
    distributed_c10d._world.pg_group_ranks[group] = {each: each for each in range(size)}
    return group


def receive(body: dict, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """The tensors of a flat part, as SGLang's FlattenedTensorBucket cuts it."""
    assert body["load_format"] == "flattened_bucket"
    dtypes = [getattr(torch, name) for name in body["dtypes"]]
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(body["shapes"], dtypes)]
    flat = torch.empty(sum(sizes), dtype=torch.uint8)
    dist.broadcast(flat, src=0, group=group)
    tensors = {}
    for name, shape, dtype, part in zip(body["names"], body["shapes"], dtypes, flat.split(sizes)):
        tensors[name] = part.view(dtype).reshape(shape).clone()
    return tensors
