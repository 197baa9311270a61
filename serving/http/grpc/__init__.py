"""The Open Inference Protocol over gRPC (of the extra `grpc`)."""
