"""The whole chain on one machine: coordinator, two vLLM workers, a reward process and a verl trainer."""
