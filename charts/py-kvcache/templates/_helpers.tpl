{{/* Names are fixed: the CSI driver's is, so there is one release per cluster, and every command in the docs fits it. */}}

{{- define "pykvcache.labels" -}}
app.kubernetes.io/name: py-kvcache
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: py-kvcache
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "pykvcache.podLabels" -}}
{{ include "pykvcache.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "pykvcache.selector" -}}
app.kubernetes.io/name: py-kvcache
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "pykvcache.image" -}}
{{- $image := index .root.Values.images .name -}}
{{- $path := printf "%s/%s" .root.Values.images.registry $image.repository -}}
{{- if $image.digest -}}
{{ printf "%s@%s" $path $image.digest }}
{{- else -}}
{{ printf "%s:%s" $path ($image.tag | default .root.Chart.AppVersion) }}
{{- end -}}
{{- end }}

{{- define "pykvcache.pullSecrets" -}}
{{- with .Values.images.pullSecrets -}}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "pykvcache.scrape" -}}
{{- if .root.Values.metrics.scrapeAnnotations -}}
annotations:
  prometheus.io/scrape: "true"
  prometheus.io/port: {{ .port | quote }}
  prometheus.io/path: /metrics
{{- end }}
{{- end }}

{{/* What Pod Security "restricted" asks of a pod and of a container. */}}
{{- define "pykvcache.restrictedPod" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "pykvcache.restrictedContainer" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "pykvcache.operatorPort" -}}9411{{- end }}
{{- define "pykvcache.agentPort" -}}9479{{- end }}
{{- define "pykvcache.csiDriver" -}}csi.pykvcache.io{{- end }}
{{- define "pykvcache.lease" -}}pykvcache-operator{{- end }}

{{- define "pykvcache.egress" }}
- ports: # the API server, whose address as pods see it no selector knows
    {{- range .Values.networkPolicy.apiServerPorts }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
- ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
{{- end }}

{{- define "pykvcache.ingress" }}
- ports:
    - {protocol: TCP, port: metrics}
  {{- with .Values.networkPolicy.metricsFrom }}
  from: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* Fails where values that are fine alone do not fit each other. */}}
{{- define "pykvcache.check" -}}
{{- if .Values.webhook.enabled }}{{ include "pykvcache.checkWebhook" . }}{{ end }}
{{- if eq .Values.agent.namespace .Release.Namespace }}
{{- fail (printf "agent.namespace is %q, the release's own namespace. The agent is privileged and needs a namespace of its own: install the release into another one (helm install -n pykvcache-system) or set agent.namespace." .Values.agent.namespace) }}
{{- end }}
{{- range $path := .Values.storage.allowedPaths }}
{{- $seen := false }}
{{- range $directory := $.Values.agent.diskDirectories }}
{{- if or (eq $path $directory) (hasPrefix (printf "%s/" (trimSuffix "/" $directory)) $path) }}{{ $seen = true }}{{ end }}
{{- end }}
{{- if and $.Values.agent.enabled (not $seen) }}
{{- fail (printf "storage.allowedPaths has %q, which the agent cannot see. Add it, or a directory above it, to agent.diskDirectories." $path) }}
{{- end }}
{{- end }}
{{- if and .Values.pool.create (not .Values.pool.spec) }}
{{- fail "pool.create is true and pool.spec is empty. Give the pool a spec, for example {storage: {type: NodeLocal, capacityPerNode: 500Gi}}." }}
{{- end }}
{{- if and (or .Values.metrics.serviceMonitor.enabled .Values.metrics.podMonitor.enabled) (not (.Capabilities.APIVersions.Has "monitoring.coreos.com/v1")) }}
{{- fail "metrics.serviceMonitor or metrics.podMonitor is enabled, but this cluster does not serve monitoring.coreos.com/v1. Install the Prometheus Operator first, or set them to false; without a cluster, render with --api-versions monitoring.coreos.com/v1." }}
{{- end }}
{{- end }}
