"""LoRA adapters: PEFT's files, what they come to in one model, and how they take part in a step."""
