"""sync.py, with the arguments of sync.py, where a tied head is not processed again after an update, as in vLLM."""

import runpy
from pathlib import Path

from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

from common.rollout.vllm_weights import InProcessTransfer

InProcessTransfer.finish_weight_update = lambda self: finalize_layerwise_reload(self.model, self.model_config)
runpy.run_path(str(Path(__file__).with_name("sync.py")), run_name="__main__")
