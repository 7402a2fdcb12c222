"""Scores of a reward model sharded over the ranks, with more responses on one rank: sharded_reward.py FOLDER"""

import json
import sys

import torch.distributed as dist

from common import errors, placement
from common.data import arithmetic as embedded
from common.rewards import model as reward_model
from common.rewards.grading import Item

world = placement.init(seed=0)
reward_model.MAX_BATCH_TOKENS = 40  # one or two conversations a forward
reward = reward_model.RewardModel(sys.argv[1], sharded=True)
items = [Item(f"{a}+38=", embedded.solution(a, 38), str(a + 38)) for a in (11, 22, 47, 58, 99)]
mine = items[: 1 if world.rank else 5]
scores = [result.score for result in reward(mine, [0] * len(mine), [False] * len(mine))]
too_long = Item("1+1=", "1" * 300, "2") if world.rank else items[0]
try:
    reward([too_long], [0], [False])
    said = ""
except errors.BadInput as error:
    said = str(error)
everyone = [None] * world.size
dist.all_gather_object(everyone, {"scores": scores, "said": said, "kind": type(reward.model.base_model).__name__})
if world.is_main:
    print(json.dumps(everyone), flush=True)
placement.finish(world)
