"""vLLM's LLaVA imports a function from a file of transformers that wants torchvision. Its twin for PIL has it, too.

Python reads this file at the start of each process that has its folder on PYTHONPATH: vLLM inspects models in one.
"""

import importlib.abc
import importlib.util
import sys

PIXTRAL = "transformers.models.pixtral.image_processing_pixtral"


class Twin(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != PIXTRAL or importlib.util.find_spec("torchvision"):
            return None
        twin = importlib.util.find_spec(PIXTRAL.replace("image_processing", "image_processing_pil"))
        return importlib.util.spec_from_file_location(name, twin.origin)


sys.meta_path.insert(0, Twin())
