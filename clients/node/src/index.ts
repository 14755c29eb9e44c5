/** A client for Quire: see the README. */

export { create } from "@bufbuild/protobuf";
export { status } from "@grpc/grpc-js";

export type { PrefillItem, PrefillSettings, Scored, ScoreItem, ScoreSettings, Tokens } from "./batches.js";
export { type AppendOptions, Cache, Caller, type ForkOptions, type Verified } from "./cache.js";
export { Answer, type Chunk } from "./chunks.js";
export { type ClientOptions, QuireClient, type TlsOptions } from "./client.js";
export type { CallOptions } from "./connection.js";
export type { Accept, Cause, FinishReason, NumberFormat, Policy, Priority } from "./enums.js";
export * from "./errors.js";
export { type ExecuteSettings, Execution } from "./execution.js";
export * as admin from "./gen/quire/v1/admin_pb.js";
export * as executor from "./gen/quire/v1/executor_pb.js";
export * as runner from "./gen/quire/v1/runner_pb.js";
export * as types from "./gen/quire/v1/types_pb.js";
export { type ChatMessage, type ConstraintSettings, item, type Prompt, type SpeculationSettings, type TextSettings } from "./items.js";
export type { Method, Request, Response } from "./methods.js";
export { type Allowed, type Output, outputOptions, type OutputSettings, type SamplingSettings, tokenMask } from "./options.js";
export { Session, type SessionOptions } from "./session.js";
export type { AdapterFiles, WeightFiles } from "./uploads.js";
