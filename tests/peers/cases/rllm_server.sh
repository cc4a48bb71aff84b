python -m rllm.sdk.proxy.litellm_server --host localhost --port 4000 --project mine
