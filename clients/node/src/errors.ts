/**
 * The errors of failed calls.
 *
 *     QuireError
 *     ├── InvalidRequest        INVALID_ARGUMENT; `violations` names the fields
 *     ├── NotFound              NOT_FOUND
 *     │   ├── AdapterNotFound
 *     │   ├── CacheNotFound
 *     │   └── RuntimeNotFound
 *     ├── PreconditionFailed    FAILED_PRECONDITION
 *     │   └── PositionMismatch  the cache has another length than expected: `seqLen`
 *     ├── OutOfRange            OUT_OF_RANGE
 *     ├── ResourceExhausted     RESOURCE_EXHAUSTED
 *     ├── Aborted               ABORTED: another call replaced or blocks this one
 *     ├── Unavailable           UNAVAILABLE, after the retries
 *     │   └── SessionEnded      the session is closed or broken; its cause is the `cause`
 *     ├── Unauthenticated       UNAUTHENTICATED
 *     ├── PermissionDenied      PERMISSION_DENIED: the token does not have the role
 *     ├── DeadlineExceeded      DEADLINE_EXCEEDED
 *     ├── Cancelled             CANCELLED
 *     └── InternalError         everything else
 */

import { create, fromBinary } from "@bufbuild/protobuf";
import { Metadata, type ServiceError, status } from "@grpc/grpc-js";

import { msOf } from "./duration.js";
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import { type Status, StatusSchema } from "./gen/google/rpc/status_pb.js";

const DETAILS_KEY = "grpc-status-details-bin";
// What grpc-js says where nothing listens.
const NOT_CONNECTED = "No connection established";

/** The details of a failure, besides its code and message. */
export interface ErrorFacts {
  reason?: string;
  metadata?: Record<string, string>;
  retryDelayMs?: number | undefined;
  violations?: readonly Violation[];
  cause?: unknown;
}

/** An invalid field of the request, such as `items[3].token_id`. */
export interface Violation {
  field: string;
  description: string;
}

/** A failed call, or a failed item of a batch. `reason` is stable and machine-readable; the message is for humans. */
export class QuireError extends Error {
  /** One of grpc-js's `status`. */
  readonly code: status;
  /** Such as "KV_EXHAUSTED"; docs/errors.md lists them. Empty if the failure was not reported by a Quire server. */
  readonly reason: string;
  /** Details of the reason, such as numbers, as strings. May include the server's request_id. */
  readonly metadata: Readonly<Record<string, string>>;
  /** How long to wait before a retry. Undefined: a retry does not help, or it is not known. */
  readonly retryDelayMs: number | undefined;
  readonly violations: readonly Violation[];

  constructor(code: status, message: string, facts: ErrorFacts = {}) {
    const reason = facts.reason ?? "";
    super(`${status[code] ?? code}${reason && ` ${reason}`}: ${message}`, { cause: facts.cause });
    this.name = new.target.name;
    this.code = code;
    this.reason = reason;
    this.metadata = facts.metadata ?? {};
    this.retryDelayMs = facts.retryDelayMs;
    this.violations = facts.violations ?? [];
  }
}

/** The request is invalid. */
export class InvalidRequest extends QuireError {}

/** The named object does not exist. */
export class NotFound extends QuireError {}

/** The server's configuration has no such runtime. */
export class RuntimeNotFound extends NotFound {}

/** No adapter has this id, or it is another tenant's. */
export class AdapterNotFound extends NotFound {}

/** The cache never existed, was released, or its lease ran out. */
export class CacheNotFound extends NotFound {}

/** The current state does not allow the call. */
export class PreconditionFailed extends QuireError {}

/** Another client changed the cache, or an earlier call was applied although its response was lost. */
export class PositionMismatch extends PreconditionFailed {
  /** The cache's real length in tokens. */
  get seqLen(): number {
    return Number(this.metadata["seq_len"]);
  }
}

/** A position is beyond the end of the cache, or of the model's context. */
export class OutOfRange extends QuireError {}

/** The KV pages, the queue or the quota are exhausted, or a message exceeds the size limit. */
export class ResourceExhausted extends QuireError {}

/** Another call replaced this one (`reason` RESUMED_ELSEWHERE), or blocks it (LOADING). */
export class Aborted extends QuireError {}

/** The server is unreachable, has no worker, or cannot write to its disk. Caches are kept. */
export class Unavailable extends QuireError {}

/**
 * The session is closed or broken. The error that ended it is the `cause`; `reason` is its reason. Appends can be retried on
 * another session, see `adopt`: they are not applied twice.
 */
export class SessionEnded extends Unavailable {}

/** The call has no token, or an unknown one. */
export class Unauthenticated extends QuireError {}

/** The token does not have the role that the call requires. */
export class PermissionDenied extends QuireError {}

/** The timeout passed. An append may have been applied; retrying it is safe. */
export class DeadlineExceeded extends QuireError {}

/** The call was cancelled. */
export class Cancelled extends QuireError {}

/** The server failed, or its response is unknown to this client. */
export class InternalError extends QuireError {}

const BY_REASON = new Map<string, typeof QuireError>([
  ["ADAPTER_NOT_FOUND", AdapterNotFound],
  ["CACHE_NOT_FOUND", CacheNotFound],
  ["POSITION_MISMATCH", PositionMismatch],
  ["RUNTIME_NOT_FOUND", RuntimeNotFound],
]);
const BY_CODE = new Map<status, typeof QuireError>([
  [status.INVALID_ARGUMENT, InvalidRequest],
  [status.NOT_FOUND, NotFound],
  [status.ABORTED, Aborted],
  [status.FAILED_PRECONDITION, PreconditionFailed],
  [status.OUT_OF_RANGE, OutOfRange],
  [status.RESOURCE_EXHAUSTED, ResourceExhausted],
  [status.UNAVAILABLE, Unavailable],
  [status.DEADLINE_EXCEEDED, DeadlineExceeded],
  [status.CANCELLED, Cancelled],
  [status.UNAUTHENTICATED, Unauthenticated],
  [status.PERMISSION_DENIED, PermissionDenied],
]);

/** The error for a google.rpc.Status, such as that of a failed item of a batch. */
export function errorFromStatus(failed: Status, cause?: unknown): QuireError {
  const facts: ErrorFacts = { cause };
  for (const { typeUrl, value } of failed.details) {
    switch (typeUrl.slice(typeUrl.lastIndexOf("/") + 1)) {
      case "google.rpc.ErrorInfo": {
        const info = fromBinary(ErrorInfoSchema, value);
        facts.reason = info.reason;
        facts.metadata = info.metadata;
        break;
      }
      case "google.rpc.RetryInfo": {
        facts.retryDelayMs = msOf(fromBinary(RetryInfoSchema, value).retryDelay);
        break;
      }
      case "google.rpc.BadRequest": {
        const { fieldViolations } = fromBinary(BadRequestSchema, value);
        facts.violations = fieldViolations.map(({ field, description }) => ({ field, description }));
        break;
      }
    }
  }
  const Kind = BY_REASON.get(facts.reason ?? "") ?? BY_CODE.get(failed.code) ?? InternalError;
  return new Kind(failed.code, failed.message, facts);
}

/**
 * The error for a failed gRPC call, with the error details that Quire attaches. `proxy`: that of its target, which is named
 * where the failure may be the proxy's.
 */
export function errorFromCall(error: ServiceError, proxy = ""): QuireError {
  let message = error.details;
  if (error.code === status.UNAVAILABLE && message.includes(NOT_CONNECTED)) message += " (is a server running there?)";
  const maybeOfProxy = error.code === status.UNAVAILABLE || error.code === status.DEADLINE_EXCEEDED;
  if (proxy && maybeOfProxy) message += ` (through the proxy ${proxy})`;
  for (const value of (error.metadata ?? new Metadata()).get(DETAILS_KEY)) {
    try {
      const rich = fromBinary(StatusSchema, value as Buffer);
      // If a proxy has replaced the status, the details describe another failure.
      if (rich.code === error.code) return errorFromStatus(rich, error);
    } catch {
      // Not written by a Quire server.
    }
  }
  return errorFromStatus(create(StatusSchema, { code: error.code, message }), error);
}

/**
 * Whether a call has failed on its way: the server is away, or the stream was broken off. Then a call that is safe to repeat
 * can succeed. An error of the server itself has a reason. Without one it is gRPC's, as of a server that stops before it has
 * read the call, or that of a proxy. Or it is that of a signal that has cancelled the call.
 */
export function isConnectionError(error: QuireError, signal: AbortSignal | undefined): boolean {
  if (error instanceof Cancelled && signal?.aborted) return false;
  const isBrokenOff = [status.CANCELLED, status.INTERNAL, status.UNKNOWN].includes(error.code) && !error.reason;
  return isBrokenOff || error instanceof Unavailable;
}

/** This client cancelled the call. */
export function cancelled(): QuireError {
  return new Cancelled(status.CANCELLED, "cancelled by this client");
}

/** The timeout passed. */
export function tooLate(timeoutMs: number): QuireError {
  return new DeadlineExceeded(status.DEADLINE_EXCEEDED, `no answer within ${timeoutMs} ms`);
}
