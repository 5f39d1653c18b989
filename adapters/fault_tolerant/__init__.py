"""Any torch optimizer as one of several replicas."""
