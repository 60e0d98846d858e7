"""How a call is divided, as data: plan, layout of tokens, schedule, and what each rank sends and keeps."""
