from rllm.engine import AgentWorkflowEngine, OpenAIEngine

engine = AgentWorkflowEngine(rollout_engine=OpenAIEngine(model="small"), n_parallel_tasks=4)
