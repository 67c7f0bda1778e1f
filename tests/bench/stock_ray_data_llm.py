"""Batch inference with ray.data.llm as its documentation shows it: read the file, process it, write rows.

Run as ``python stock_ray_data_llm.py INPUT OUTPUT MODEL ENGINE_KWARGS_JSON``. It starts its own Ray.
On a machine without a GPU three things differ from the documentation's example, which would never start: the
placement of the engine on CPUs, the CPUs that the stages reserve, and the executor. The chat template runs in a
separate stage. The engine tokenizes and detokenizes, which saves two more actors that import vLLM and is faster on
few cores.
"""

import json
import sys
from pathlib import Path
from typing import Any

import ray
from ray.data.llm import build_processor, vLLMEngineProcessorConfig

BATCH_SIZE = 32  # Ray's default
SAMPLING_FIELDS = ("max_tokens", "min_tokens", "temperature")


def preprocess(row: dict[str, Any]) -> dict[str, Any]:
    body = row["body"]
    return {
        "messages": body["messages"],
        "sampling_params": {name: body[name] for name in SAMPLING_FIELDS},
    }


def postprocess(row: dict[str, Any]) -> dict[str, Any]:
    return {"custom_id": row["custom_id"], "answer": row["generated_text"]}


def main() -> None:
    source, target, model, engine_kwargs = sys.argv[1:]
    ray.init()
    on_gpu = ray.cluster_resources().get("GPU", 0) > 0
    config = vLLMEngineProcessorConfig(
        model_source=model,
        engine_kwargs=json.loads(engine_kwargs),
        concurrency=1,
        batch_size=BATCH_SIZE,
        placement_group_config=None if on_gpu else {"bundle_per_worker": {"CPU": 1}},
        chat_template_stage={"enabled": True, "num_cpus": 0.25},
        tokenize_stage=False,
        detokenize_stage=False,
    )
    processor = build_processor(
        config,
        preprocess=preprocess,
        postprocess=postprocess,
        preprocess_map_kwargs={"num_cpus": 0.25},
        postprocess_map_kwargs={"num_cpus": 0.25},
    )
    # By default the file is one block, and no row is visible before the last one is finished.
    blocks = -(-Path(source).read_bytes().count(b"\n") // BATCH_SIZE)
    answers = processor(ray.data.read_json(source, override_num_blocks=blocks, ray_remote_args={"num_cpus": 0.25}))
    with Path(target).open("w", buffering=1) as file:
        file.writelines(json.dumps(row) + "\n" for row in answers.iter_rows())
    ray.shutdown()


if __name__ == "__main__":
    main()
