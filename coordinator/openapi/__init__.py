"""The OpenAPI page: roles, refusals and examples of every call, put into the document that FastAPI makes."""
