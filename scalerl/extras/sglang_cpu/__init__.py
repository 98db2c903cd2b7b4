"""SGLang without a GPU: its arguments and environment, its plugin, and what stands in for packages that it imports."""
