"""LoRA adapters on a frozen base: `peft` injects, saves and loads them."""
