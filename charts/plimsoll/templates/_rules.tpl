{{/* What the operator does in a namespace, and nothing else. Server-side apply needs create and patch. */}}
{{- define "plimsoll.rules" -}}
# The user's objects: read, never written but for their status.
- apiGroups: [plimsoll.dev]
  resources: [llmdeployments]
  verbs: [get, list, watch]
- apiGroups: [plimsoll.dev]
  resources: [llmdeployments/status]
  verbs: [patch]
# Where owner references are guarded, children may only block the deletion of what may be finalized.
- apiGroups: [plimsoll.dev]
  resources: [llmdeployments/finalizers]
  verbs: [update]
# Advice about what others run: read, never written.
- apiGroups: [plimsoll.dev]
  resources: [memoryadvisors]
  verbs: [get, list, watch]
- apiGroups: [plimsoll.dev]
  resources: [memoryadvisors/status]
  verbs: [patch]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get]
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get]
{{- if include "plimsoll.leaderWorkerSet" . }}
# Replicas of several pods: these are children too.
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [create, patch, delete]
{{- end }}
# What was learned.
- apiGroups: [plimsoll.dev]
  resources: [memoryprofiles]
  verbs: [get, list, watch, create, patch]
- apiGroups: [plimsoll.dev]
  resources: [memoryprofiles/status]
  verbs: [patch]
# The children of an LLMDeployment.
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [get, list, watch, create, patch, delete]
# To list Secrets would be to read all of them.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, patch, delete]
- apiGroups: [apps]
  resources: [statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
{{- if include "plimsoll.inferencePool" . }}
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [get, create, patch, delete]
{{- end }}
# Engine pods are made by the StatefulSet; a broken one is deleted to be made anew.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
{{- end -}}
