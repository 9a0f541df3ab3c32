"""Does at its import what transformers does for the first model of a process, for 0.15 s of CPU.

Servers that are forked (`tests.support.forked_start`) and their engines find it done.
"""

from importlib import import_module

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import_module("transformers.models.qwen3.modeling_qwen3")  # nearly all bases of tests are Qwen3's
get_checkpoint_conversion_mapping("")  # compiles a thousand patterns of names
