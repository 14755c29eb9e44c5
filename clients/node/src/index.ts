/** A client for Quire: see the README. */

export { status } from "@grpc/grpc-js";

export { Cache, Caller, type CallName, type CallRequest, type CallResponse } from "./cache.js";
export { type ClientOptions, QuireClient, type TlsOptions } from "./client.js";
export type { CallOptions } from "./connection.js";
export { durationOf } from "./duration.js";
export { errorFromCall, errorFromStatus, QuireError, SessionEnded, type Violation } from "./errors.js";
export { type ExecuteSettings, Execution, item, type Prompt } from "./execution.js";
export * as admin from "./gen/quire/v1/admin.js";
export * as executor from "./gen/quire/v1/executor.js";
export * as runner from "./gen/quire/v1/runner.js";
export * as types from "./gen/quire/v1/types.js";
export { Session, type SessionOptions } from "./session.js";
