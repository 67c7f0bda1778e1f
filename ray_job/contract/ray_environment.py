"""Environment variables that every Ray of cloister starts with, on this machine and in pods."""

from typing import Final

RAY_ENVIRONMENT: Final = {
    # Ray raises the niceness of its workers by 15, and the engines that they start inherit it. On a busy machine
    # the engine then waits for processes that matter less, and its GPU with it.
    # Source: the setting worker_niceness of Ray's core, which each worker reads from its environment.
    "RAY_worker_niceness": "0",
    # Ray starts a Python process for each of its CPUs when a job begins. They would take the processors from the
    # engine, which starts at the same moment, and most of them get no work.
    # Source: the settings of these names in Ray's ray_config_def.h.
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}
