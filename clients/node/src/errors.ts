/** The errors of failed calls. */

import { Metadata, type ServiceError, status } from "@grpc/grpc-js";

import { BadRequest, ErrorInfo, RetryInfo } from "./gen/google/rpc/error_details.js";
import { Status } from "./gen/google/rpc/status.js";

const DETAILS_KEY = "grpc-status-details-bin";

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

/** A failed call, or a failed item of a batch. `reason` is stable and machine-readable. */
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

/**
 * The session is closed or broken. The error that ended it is the `cause`; `reason` is its reason. Appends can be retried on
 * another session: they are not applied twice.
 */
export class SessionEnded extends QuireError {}

/** The error for a google.rpc.Status, such as that of a failed item of a batch. */
export function errorFromStatus(failed: Status, cause?: unknown): QuireError {
  const facts: ErrorFacts = { cause };
  for (const { typeUrl, value } of failed.details) {
    switch (typeUrl.slice(typeUrl.lastIndexOf("/") + 1)) {
      case "google.rpc.ErrorInfo": {
        const info = ErrorInfo.decode(value);
        facts.reason = info.reason;
        facts.metadata = info.metadata;
        break;
      }
      case "google.rpc.RetryInfo": {
        const delay = RetryInfo.decode(value).retryDelay;
        facts.retryDelayMs = delay && Number(delay.seconds) * 1e3 + delay.nanos / 1e6;
        break;
      }
      case "google.rpc.BadRequest":
        facts.violations = BadRequest.decode(value).fieldViolations;
        break;
    }
  }
  return new QuireError(failed.code, failed.message, facts);
}

/**
 * The error for a failed gRPC call, with the error details that Quire attaches. `proxy`: that of its target, which is named
 * where the failure may be the proxy's.
 */
export function errorFromCall(error: ServiceError, proxy = ""): QuireError {
  const maybeOfProxy = error.code === status.UNAVAILABLE || error.code === status.DEADLINE_EXCEEDED;
  const through = proxy && maybeOfProxy ? ` (through the proxy ${proxy})` : "";
  const plain = Status.fromPartial({ code: error.code, message: error.details + through });
  for (const value of (error.metadata ?? new Metadata()).get(DETAILS_KEY)) {
    try {
      const rich = Status.decode(value as Buffer);
      // If a proxy has replaced the status, the details describe another failure.
      if (rich.code === plain.code) return errorFromStatus(rich, error);
    } catch {
      // Not written by a Quire server.
    }
  }
  return errorFromStatus(plain, error);
}

/** This client cancelled the call. */
export function cancelled(): QuireError {
  return new QuireError(status.CANCELLED, "cancelled by this client");
}

/** The timeout passed. */
export function tooLate(timeoutMs: number): QuireError {
  return new QuireError(status.DEADLINE_EXCEEDED, `no answer within ${timeoutMs} ms`);
}
