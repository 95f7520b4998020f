"""What a policy does, as data (`facts`) and in words (`words`). Imports nothing of the runtime."""
