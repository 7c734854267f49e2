"""The learner side: verl's training engine over one LoRA adapter."""
