"""Tasks: what to generate for, one group of rollouts each. From a file, stdin, a task service, or a Python function."""

from worker_agent.tasks.lines import read_tasks
from worker_agent.tasks.queue import TaskQueue
from worker_agent.tasks.source import open_tasks
from worker_agent.tasks.task import Message, Task, TaskError

__all__ = ["Message", "Task", "TaskError", "TaskQueue", "open_tasks", "read_tasks"]
